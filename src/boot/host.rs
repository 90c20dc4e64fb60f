//! What the host must give before anything serves: descriptors, cores, a ring, a port.
//!
//! Takes configuration and host, gives values or one line that says what to change. Never starts a lane.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;

use rustix::event::{EventfdFlags, eventfd};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use socket2::{Domain, Protocol, Socket, Type};

use crate::config::Config;
use crate::lane::wire::ring::{Mode, Ring};
use crate::limits::MAX_LANES;

/// Raises the limit of open files to what the process may have.
pub fn raise_nofile() {
    let now = getrlimit(Resource::Nofile);
    if now.current != now.maximum {
        let _ = setrlimit(Resource::Nofile, Rlimit { current: now.maximum, maximum: now.maximum });
    }
}

/// Says how many there are.
pub fn report_nofile() {
    let limit = getrlimit(Resource::Nofile).current;
    let shown = limit.map_or("unlimited".to_owned(), |n| n.to_string());
    tracing::info!(open_files = %shown, "descriptor limit");
    if limit.is_some_and(|n| n < 8192) {
        tracing::warn!("fewer than 8192 open files are allowed: raise LimitNOFILE= (systemd) or ulimit -Hn");
    }
}

/// Descriptors that a gateway without a single connection needs, and those of each of its lanes: generously counted.
pub const OWN_FILES: usize = 16;
pub const LANE_FILES: usize = 8;
/// What to change where there are too few.
const RAISE_FILES: &str = "descriptors are short: raise LimitNOFILE= (systemd) or ulimit -n";

/// Opens as many descriptors as the start will need and closes them, to fail before anything serves: some of the
/// parts panic without.
pub fn try_files(lanes: usize) -> Result<(), String> {
    let mut spare: Vec<OwnedFd> = Vec::new();
    for _ in 0..OWN_FILES + LANE_FILES * lanes {
        let made = eventfd(0, EventfdFlags::CLOEXEC).map_err(io::Error::from);
        spare.push(made.map_err(|e| format!("too few files may be open ({e}): {RAISE_FILES}"))?);
    }
    Ok(())
}

/// Client connections that each of `lanes` lanes can have: half of the descriptors that are left for connections. The
/// other half is for those to workers.
pub fn connections_per_lane(lanes: usize) -> u32 {
    share(getrlimit(Resource::Nofile).current, lanes)
}

/// The same for a limit of `files`; `None` is none.
pub fn share(files: Option<u64>, lanes: usize) -> u32 {
    let Some(files) = files else { return u32::MAX };
    let own = (OWN_FILES + LANE_FILES * lanes) as u64;
    (files.saturating_sub(own) / 2 / lanes.max(1) as u64).clamp(1, u32::MAX.into()) as u32
}

/// Cores of this process's affinity mask, in order.
fn allowed_cores() -> Vec<usize> {
    let Ok(set) = rustix::thread::sched_getaffinity(None) else { return vec![0] };
    (0..rustix::thread::CpuSet::MAX_CPU).filter(|core| set.is_set(*core)).collect()
}

/// The lanes' cores: those asked for, or every one of the affinity mask.
pub fn lane_cores(asked: &[usize]) -> Result<Vec<usize>, String> {
    let allowed = allowed_cores();
    let missing: Vec<_> = asked.iter().filter(|c| !allowed.contains(c)).collect();
    if !missing.is_empty() {
        return Err(format!(
            "cores {missing:?} are not in this process's affinity mask {allowed:?}: change --cores, or the taskset, \
             cpuset or CPUAffinity= that the process runs under"
        ));
    }
    let cores = if asked.is_empty() { allowed } else { asked.to_vec() };
    if cores.len() > MAX_LANES {
        return Err(format!("{} lanes are more than {MAX_LANES}: name fewer cores with --cores", cores.len()));
    }
    Ok(cores)
}

/// The control thread's core: the one asked for, else the first that is no lane's, else none in particular.
pub fn control_core(asked: Option<usize>, lanes: &[usize]) -> Result<Option<usize>, String> {
    let allowed = allowed_cores();
    match asked {
        Some(core) if !allowed.contains(&core) => Err(format!(
            "control core {core} is not in this process's affinity mask {allowed:?}: change --control-core"
        )),
        Some(core) => Ok(Some(core)),
        None => Ok(allowed.into_iter().find(|c| !lanes.contains(c))),
    }
}

/// Makes a ring and drops it, to fail before anything serves.
pub fn probe_ring() -> Result<Mode, String> {
    try_calls().map_err(explain_ring)?;
    let ring = Ring::new().map_err(explain_ring)?;
    let mode = ring.mode();
    if !ring.has_buffers() {
        tracing::warn!("this kernel has no buffer rings (5.19 or newer has): idle connections hold a receive buffer");
    }
    ring.wind_down();
    Ok(mode)
}

/// Makes each of io_uring's three system calls: a profile may forbid one alone, and an executor panics then.
fn try_calls() -> io::Result<()> {
    let ring = io_uring::IoUring::new(8)?;
    ring.submitter().register_probe(&mut io_uring::Probe::new())?;
    ring.submitter().submit().map(drop)
}

/// What to change where a ring cannot be made.
pub fn explain_ring(e: io::Error) -> String {
    let why = match e.raw_os_error() {
        Some(libc::ENOSYS) => "this kernel has none: Linux 5.19 or newer is needed, 6.1 or newer is best",
        Some(libc::EPERM | libc::EACCES) => {
            "it is forbidden here: set sysctl kernel.io_uring_disabled=0, or allow io_uring_setup, io_uring_enter and \
             io_uring_register in the container's seccomp profile"
        }
        Some(libc::ENOMEM) => "locked memory is short: raise LimitMEMLOCK= (systemd) or ulimit -l to 64 MiB or more",
        Some(libc::EMFILE | libc::ENFILE) => RAISE_FILES,
        _ => "see the error",
    };
    format!("io_uring cannot be used ({e}): {why}")
}

/// A listening socket for each lane, all on one address.
pub fn listen(config: &Config, lanes: usize) -> Result<Vec<TcpListener>, String> {
    let mut address = SocketAddr::new(config.host, config.port);
    let explain = |address: SocketAddr, e: io::Error| {
        let why = match e.raw_os_error() {
            Some(libc::EADDRINUSE) => {
                "another process listens there, or a connection of this host has that port (ss -tanp tells): stop it, or change --port"
            }
            Some(libc::EACCES) => "the port needs a privilege: use one above 1023, or grant CAP_NET_BIND_SERVICE",
            Some(libc::EMFILE | libc::ENFILE) => RAISE_FILES,
            Some(libc::EADDRNOTAVAIL) => "no interface of this host has the address: change --host",
            _ => "change --host or --port",
        };
        format!("cannot listen on {address} ({e}): {why}")
    };
    // Sockets with REUSEPORT would share the port with another gateway of the same user without a word: one
    // without it finds out.
    let probe = bind(address, false, config.backlog).map_err(|e| explain(address, e))?;
    address = probe.local_addr().map_err(|e| explain(address, e))?;
    drop(probe);
    (0..lanes).map(|_| bind(address, true, config.backlog).map_err(|e| explain(address, e))).collect()
}

fn bind(address: SocketAddr, share: bool, backlog: u32) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    if share {
        socket.set_reuse_port(true)?;
    }
    if address.is_ipv6() {
        socket.set_only_v6(false)?;
    }
    socket.bind(&address.into())?;
    socket.listen(backlog.min(i32::MAX as u32) as i32)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_that_fails_says_what_to_change() {
        for (number, fix) in [
            (libc::ENOSYS, "Linux 5.19 or newer"),
            (libc::EPERM, "kernel.io_uring_disabled"),
            (libc::EACCES, "seccomp"),
            (libc::ENOMEM, "LimitMEMLOCK="),
            (libc::EMFILE, "LimitNOFILE="),
            (libc::ENFILE, "ulimit -n"),
            (libc::EIO, "see the error"),
        ] {
            let line = explain_ring(io::Error::from_raw_os_error(number));
            assert!(line.starts_with("io_uring cannot be used (") && line.contains(fix), "{line}");
            assert!(line.contains(&format!("os error {number}")) && !line.contains('\n'), "{line}");
        }
    }

    #[test]
    fn lanes_share_half_of_the_descriptors() {
        assert_eq!(share(Some(1 << 20), 4), 131_066);
        assert_eq!(share(Some(64), 2), 8);
        assert_eq!(share(Some(10), 2), 1, "somebody can get in");
        assert_eq!(share(None, 2), u32::MAX);
    }

    #[test]
    fn cores_outside_of_the_mask_are_named() {
        let allowed = allowed_cores();
        assert_eq!(lane_cores(&allowed), Ok(allowed.clone()));
        let line = lane_cores(&[allowed[0], 1000]).unwrap_err();
        assert!(line.contains("[1000]") && line.contains("affinity mask") && line.contains("--cores"), "{line}");
        assert_eq!(control_core(None, &allowed), Ok(None));
        assert_eq!(control_core(None, &[]), Ok(Some(allowed[0])));
        let line = control_core(Some(1000), &allowed).unwrap_err();
        assert!(line.contains("1000") && line.contains("--control-core"), "{line}");
    }

    #[test]
    fn a_port_is_one_process_s_own() {
        let mut config = Config { port: 0, ..Config::with_workers(Vec::new()) };
        let ours = listen(&config, 2).unwrap();
        config.port = ours[0].local_addr().unwrap().port();
        assert_eq!(ours[1].local_addr().unwrap().port(), config.port);
        let line = listen(&config, 1).unwrap_err();
        assert!(line.contains("another process listens there") && line.contains("--port"), "{line}");
    }
}
