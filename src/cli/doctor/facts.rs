//! What there is to know of a host, read from `/proc` and `/sys` of it or of a copy.
//!
//! Takes a tree of files, gives plain values; what cannot be read is `None` or empty. Never judges, never writes.

pub mod cores;
pub mod doors;
pub mod fleet;
pub mod nics;

use std::path::{Path, PathBuf};

use cores::Cores;
use nics::Nic;

/// `/`, or a directory that holds the `proc` and `sys` of another host.
pub struct Tree {
    root: PathBuf,
}

impl Tree {
    pub fn new(root: impl Into<PathBuf>) -> Tree {
        Tree { root: root.into() }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// A file's text, without the spaces around it.
    pub fn text(&self, path: &str) -> Option<String> {
        let bytes = std::fs::read(self.at(path)).ok()?;
        Some(String::from_utf8_lossy(&bytes).trim().to_owned())
    }

    /// A file that holds a number.
    pub fn number(&self, path: &str) -> Option<u64> {
        self.text(path)?.parse().ok()
    }

    /// A file that holds a list such as `0-3,6`.
    pub fn list(&self, path: &str) -> Option<Vec<usize>> {
        self.text(path).map(|text| list(&text))
    }

    /// The names in a directory, in order.
    pub fn names(&self, path: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.at(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> = entries.filter_map(|e| e.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    pub fn exists(&self, path: &str) -> bool {
        Path::exists(&self.at(path))
    }
}

/// Numbers of a list such as `0-3,6`; what is no number is left out.
pub fn list(text: &str) -> Vec<usize> {
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        // No host has more cores; a broken file must not fill the memory.
        (last < 1 << 16).then_some(first..=last)
    };
    text.split(',').filter_map(range).flatten().collect()
}

/// The same the other way: `0-3,6`.
pub fn ranges(numbers: &[usize]) -> String {
    let mut sorted = numbers.to_vec();
    sorted.sort_unstable();
    sorted.dedup();
    let mut parts: Vec<(usize, usize)> = Vec::new();
    for n in sorted {
        match parts.last_mut() {
            Some((_, last)) if *last + 1 == n => *last = n,
            _ => parts.push((n, n)),
        }
    }
    let shown = |(a, b): &(usize, usize)| if a == b { a.to_string() } else { format!("{a}-{b}") };
    parts.iter().map(shown).collect::<Vec<_>>().join(",")
}

/// A limit of a process; [`u64::MAX`] is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    pub soft: u64,
    pub hard: u64,
}

/// A host, as far as its files tell.
pub struct Host {
    /// Of the kernel: `6.18.44-generic`.
    pub release: Option<String>,
    /// `kernel.io_uring_disabled`: 0 for all, 1 for some, 2 for nobody.
    pub io_uring_disabled: Option<u64>,
    /// Open files.
    pub files: Option<Limit>,
    /// Locked memory in bytes.
    pub locked: Option<Limit>,
    /// Effective capabilities of this process, a bit each.
    pub capabilities: u64,
    /// `fs.pipe-max-size` in bytes.
    pub pipe_max_size: Option<u64>,
    /// `fs.pipe-user-pages-soft`; 0 is no limit.
    pub pipe_user_pages_soft: Option<u64>,
    pub somaxconn: Option<u64>,
    pub max_syn_backlog: Option<u64>,
    /// First and last port that the kernel gives to connections.
    pub local_ports: Option<(u16, u16)>,
    /// Ports in that range that it does not give.
    pub reserved_ports: Vec<usize>,
    pub tw_reuse: Option<u64>,
    /// The clock in use, and those that could be.
    pub clock: Option<String>,
    pub clocks: Vec<String>,
    /// `always`, `madvise` or `never`.
    pub huge_pages: Option<String>,
    /// Names of all processes that can be seen.
    pub processes: Vec<String>,
    pub cores: Cores,
    /// Cards that are up.
    pub nics: Vec<Nic>,
}

impl Host {
    pub fn read(tree: &Tree) -> Host {
        let limits = tree.text("proc/self/limits").unwrap_or_default();
        let status = tree.text("proc/self/status").unwrap_or_default();
        Host {
            release: tree.text("proc/sys/kernel/osrelease"),
            io_uring_disabled: tree.number("proc/sys/kernel/io_uring_disabled"),
            files: limit(&limits, "Max open files"),
            locked: limit(&limits, "Max locked memory"),
            capabilities: line(&status, "CapEff:").and_then(|hex| u64::from_str_radix(hex, 16).ok()).unwrap_or(0),
            pipe_max_size: tree.number("proc/sys/fs/pipe-max-size"),
            pipe_user_pages_soft: tree.number("proc/sys/fs/pipe-user-pages-soft"),
            somaxconn: tree.number("proc/sys/net/core/somaxconn"),
            max_syn_backlog: tree.number("proc/sys/net/ipv4/tcp_max_syn_backlog"),
            local_ports: tree.text("proc/sys/net/ipv4/ip_local_port_range").and_then(|text| {
                let (first, last) = text.split_once(char::is_whitespace)?;
                Some((first.parse().ok()?, last.trim().parse().ok()?))
            }),
            reserved_ports: tree.list("proc/sys/net/ipv4/ip_local_reserved_ports").unwrap_or_default(),
            tw_reuse: tree.number("proc/sys/net/ipv4/tcp_tw_reuse"),
            clock: tree.text("sys/devices/system/clocksource/clocksource0/current_clocksource"),
            clocks: tree
                .text("sys/devices/system/clocksource/clocksource0/available_clocksource")
                .map_or(Vec::new(), |text| text.split_whitespace().map(str::to_owned).collect()),
            huge_pages: tree.text("sys/kernel/mm/transparent_hugepage/enabled").and_then(|text| {
                let (_, rest) = text.split_once('[')?;
                Some(rest.split_once(']')?.0.to_owned())
            }),
            processes: processes(tree),
            cores: Cores::read(tree, &status),
            nics: nics::read(tree),
        }
    }

    /// Whether this process has a capability, by the number that linux/capability.h gives it.
    pub fn has_capability(&self, number: u32) -> bool {
        self.capabilities >> number & 1 == 1
    }

    /// Whether a process of this name can be seen. Names are as the kernel keeps them: their first 15 bytes.
    pub fn runs(&self, name: &str) -> bool {
        self.processes.iter().any(|p| *p == name[..name.len().min(15)])
    }
}

/// What follows `name` on its line.
pub fn line<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|l| l.strip_prefix(name)).map(str::trim)
}

/// A row of `/proc/self/limits`.
fn limit(text: &str, name: &str) -> Option<Limit> {
    let mut words = line(text, name)?.split_whitespace();
    let mut next = || match words.next()? {
        "unlimited" => Some(u64::MAX),
        number => number.parse().ok(),
    };
    Some(Limit { soft: next()?, hard: next()? })
}

fn processes(tree: &Tree) -> Vec<String> {
    let is_process = |name: &String| name.bytes().all(|b| b.is_ascii_digit());
    let mut names: Vec<String> = tree
        .names("proc")
        .into_iter()
        .filter(is_process)
        .filter_map(|pid| tree.text(&format!("proc/{pid}/comm")))
        .collect();
    names.sort();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_written() {
        assert_eq!(list("0-3,6\n"), [0, 1, 2, 3, 6]);
        assert_eq!(list(""), [] as [usize; 0]);
        assert_eq!(list("0-99999999999,5,x,3-"), [5]);
        assert_eq!(ranges(&[6, 3, 2, 1, 3]), "1-3,6");
        assert_eq!(ranges(&[]), "");
    }

    #[test]
    fn limits_are_read_from_the_kernel_s_table() {
        let text = "Limit   Soft Limit   Hard Limit  Units\nMax open files  1024   524288  files\nMax locked memory  unlimited unlimited bytes\n";
        assert_eq!(limit(text, "Max open files"), Some(Limit { soft: 1024, hard: 524_288 }));
        assert_eq!(limit(text, "Max locked memory"), Some(Limit { soft: u64::MAX, hard: u64::MAX }));
        assert_eq!(limit(text, "Max nice priority"), None);
    }

    #[test]
    fn this_host_can_be_read() {
        let host = Host::read(&Tree::new("/"));
        assert!(host.release.is_some() && host.files.is_some() && host.clock.is_some());
        assert!(!host.cores.allowed.is_empty() && host.cores.allowed.iter().all(|c| host.cores.online.contains(c)));
        assert!(!host.processes.is_empty());
    }
}
