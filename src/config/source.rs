//! Where a configuration comes from, so that it can be read again, and what a new reading changes.
//!
//! Takes flags and variables of the start, gives configurations as the files make them now. Never lets a reading change
//! what only a start can change: that is named, and stays. Never waits for a pipe that is to be read again and again, and
//! never reads a file without end.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;

use super::environment::Environment;
use super::flags::FromFlags;
use super::load::{Loaded, Setting, load};
use super::mistakes::{Mistake, Origin, Wrong};
use super::values::Kind;
use crate::limits::MAX_CONFIG_BYTES;

/// Where files are read.
pub trait Files {
    /// The text of a file.
    ///
    /// # Errors
    /// The system's.
    fn read(&self, name: &str) -> io::Result<String>;

    /// The text of a file that is read again and again: a regular one.
    ///
    /// # Errors
    /// The system's, and what else the name stands for.
    fn read_lasting(&self, name: &str) -> io::Result<String> {
        self.read(name)
    }

    /// Names of the entries of a directory; `None` for what is no directory.
    ///
    /// # Errors
    /// The system's.
    fn list(&self, name: &str) -> io::Result<Option<Vec<String>>>;
}

/// The files of this host.
pub struct Disk;

impl Files for Disk {
    fn read(&self, name: &str) -> io::Result<String> {
        text(File::open(name)?)
    }

    fn read_lasting(&self, name: &str) -> io::Result<String> {
        // To open a pipe that nobody writes to would wait for somebody who does.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(name)?;
        match file.metadata()?.is_file() {
            true => text(file),
            false => Err(io::Error::new(io::ErrorKind::InvalidInput, "it is no regular file")),
        }
    }

    fn list(&self, name: &str) -> io::Result<Option<Vec<String>>> {
        if !std::fs::metadata(name)?.is_dir() {
            return Ok(None);
        }
        let entry = |entry: io::Result<std::fs::DirEntry>| Ok(entry?.file_name().to_string_lossy().into_owned());
        std::fs::read_dir(name)?.map(entry).collect::<io::Result<_>>().map(Some)
    }
}

/// What a file has to say, within bounds: a link may lead to a device.
fn text(file: File) -> io::Result<String> {
    let mut text = String::new();
    file.take(MAX_CONFIG_BYTES + 1).read_to_string(&mut text)?;
    match text.len() as u64 <= MAX_CONFIG_BYTES {
        true => Ok(text),
        false => Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("it has more than {MAX_CONFIG_BYTES} bytes"))),
    }
}

/// Texts by name, without directories.
impl<F: Fn(&str) -> io::Result<String>> Files for F {
    fn read(&self, name: &str) -> io::Result<String> {
        self(name)
    }

    fn list(&self, _: &str) -> io::Result<Option<Vec<String>>> {
        Ok(None)
    }
}

/// Flags and variables of the start.
#[derive(Clone)]
pub struct Source {
    pub flags: FromFlags,
    pub environment: Environment,
}

impl Source {
    /// Reads the files and joins everything anew.
    ///
    /// # Errors
    /// Every mistake.
    pub fn load(&self, files: impl Files) -> Result<Loaded, Vec<Mistake>> {
        load(self.flags.clone(), &self.environment, files)
    }
}

/// An option that only a start can change, and whose value in the files has changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Kept {
    pub key: &'static str,
    /// What is in effect, as TOML; `None`: not set.
    pub running: Option<String>,
    /// What the files say.
    pub wanted: Option<String>,
    /// Where they say it.
    pub origin: Origin,
}

impl Setting {
    /// Whether the value is another one; of secrets only the texts tell.
    fn differs(&self, other: &Setting) -> bool {
        let secret = matches!(self.row.kind, Kind::Secret(_) | Kind::Secrets(_));
        self.shown != other.shown || secret && self.texts != other.texts
    }
}

impl Loaded {
    /// Takes what only a start can change over from the configuration that runs; gives what would have been changed.
    pub fn keep(&mut self, running: &Loaded) -> Vec<Kept> {
        let mut kept = Vec::new();
        for (new, old) in self.settings.iter_mut().zip(&running.settings).filter(|(new, _)| !new.row.live) {
            if new.differs(old) {
                let (key, origin) = (new.row.key, new.origin.clone());
                kept.push(Kept { key, running: old.shown.clone(), wanted: new.shown.clone(), origin });
            }
            *new = old.clone();
            // It was read once already.
            let put = new.row.kind.put(&mut self.config, &new.texts);
            debug_assert!(put.is_ok(), "value of {}", new.row.key);
        }
        kept
    }

    /// What is wrong after all with what was [kept](Self::keep): the admin listener stays where it is, and would lose what
    /// guards it there.
    pub fn exposed(&self) -> Option<Mistake> {
        let token = self.settings.iter().find(|setting| setting.row.key == "admin_token");
        let origin = token.filter(|_| self.config.strangers_may_manage())?.origin.clone();
        let what = format!("is not set while the admin listener is on {}", self.config.metrics_host);
        Some(Wrong::new(what, "restart with another prometheus_host, or give a token").at(&origin, "admin_token"))
    }

    /// Names of what is another than in `other`: options and tables.
    pub fn changes(&self, other: &Loaded) -> Vec<&'static str> {
        let options = self.settings.iter().zip(&other.settings).filter(|(new, old)| {
            let workers = matches!(new.row.kind, Kind::Workers(_));
            !workers && new.differs(old)
        });
        let mut changed: Vec<&'static str> = options.map(|(new, _)| new.row.key).collect();
        if self.config.workers != other.config.workers {
            changed.push("workers");
        }
        if self.config.extra_routes != other.config.extra_routes {
            changed.push("extra_routes");
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::super::{WorkerSpec, flags};
    use super::*;

    fn read(text: &str) -> Loaded {
        let args: Vec<String> = ["--config", "c.toml", "--max-headers", "50"].map(str::to_owned).to_vec();
        let flags = flags::read(&flags::command("serve", "Serves."), &args).expect("clap has nothing to say");
        let source = Source { flags, environment: Vec::new() };
        let text = format!("worker_urls = ['http://w:1']\n{text}");
        source.load(|_: &str| Ok(text.clone())).unwrap_or_else(|all| panic!("{all:?}"))
    }

    #[test]
    fn files_without_end_are_left_alone() {
        let told = |told: io::Result<String>| told.expect_err("it has no end").to_string();
        assert!(told(Disk.read("/dev/zero")).contains("more than 67108864 bytes"));
        assert!(told(Disk.read_lasting("/dev/zero")).contains("no regular file"));
    }

    #[test]
    fn what_needs_a_restart_is_named_and_kept() {
        let running = read("port = 1\nmax_tree_size = 5000000\npolicy = 'random'");
        let mut new = read("port = 2\nprefix_memory = '2MiB'\npolicy = 'least_load'\nmax_headers = 60");
        let kept = new.keep(&running);
        let named: Vec<&str> = kept.iter().map(|k| k.key).collect();
        assert_eq!(named, ["port", "prefix_memory", "max_tree_size"]);
        assert_eq!((kept[0].running.as_deref(), kept[0].wanted.as_deref()), (Some("1"), Some("2")));
        assert_eq!(kept[0].origin.to_string(), "c.toml:2:8");
        assert_eq!((new.config.port, new.config.max_headers), (1, 50), "the flag still wins");
        assert_eq!(new.config.routing.prefix_memory_bytes, 5_000_000);
        assert_eq!(new.changes(&running), ["policy"]);
        assert!(new.to_toml().contains("port = 1"));
        assert!(new.keep(&running).is_empty());
    }

    #[test]
    fn a_listener_that_stays_keeps_its_guard() {
        let running = read("prometheus_host = '0.0.0.0'\nadmin_token = 'a'");
        let kept = |text: &str| {
            let mut new = read(text);
            new.keep(&running);
            new.exposed().map(|mistake| mistake.to_string())
        };
        assert_eq!(kept("prometheus_host = '0.0.0.0'\nadmin_token = 'b'"), None);
        assert_eq!(kept("admin_open = true"), None);
        assert!(kept("").unwrap().contains("is not set while the admin listener is on 0.0.0.0"));
    }

    #[test]
    fn changes_are_named_and_secrets_are_compared() {
        let running = read("api_key = ['a', 'b']");
        assert!(read("api_key = ['a', 'b']").changes(&running).is_empty());
        assert_eq!(read("api_key = ['a', 'c']").changes(&running), ["api_key"]);
        let more = "api_key = ['a', 'b']\n[[workers]]\nurl = 'http://x:1'\n[[extra_routes]]\npath = '/x'";
        let more = read(more);
        assert_eq!(more.changes(&running), ["workers", "extra_routes"]);
        assert_eq!(more.config.workers[1], WorkerSpec::new("http://x:1"));
    }
}
