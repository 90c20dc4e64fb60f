//! What a service manager is told: ready, reloading, stopping, and that the lanes are alive.
//!
//! Takes the environment that systemd gives to units with `Type=notify` (`NOTIFY_SOCKET`, `WATCHDOG_USEC`,
//! `WATCHDOG_PID`; sd_notify(3) describes them), gives datagrams. Never fails the gateway: without a manager nothing
//! is sent, and what cannot be sent is logged.

use std::ffi::OsString;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};

use super::lanes::BEAT;
use crate::shared::Shared;

/// Longest wait for a manager that does not read its socket.
const SEND_TIMEOUT: Duration = Duration::from_secs(1);
/// A lane that has not beaten for so long is never taken for alive, however short the watchdog's period is: four
/// beats, so that a late one stops nothing.
const LEAST_PATIENCE: Duration = BEAT.saturating_mul(4);

/// The way to the service manager, if there is one.
pub struct Manager {
    socket: Option<UnixDatagram>,
}

impl Manager {
    /// The one that started this process.
    pub fn of_process() -> Manager {
        Manager::at(std::env::var_os("NOTIFY_SOCKET"))
    }

    /// The one that listens at `address`: a path, or a name in the abstract namespace after `@`.
    pub fn at(address: Option<OsString>) -> Manager {
        let socket = address.filter(|a| !a.is_empty()).and_then(|address| match connect(address.as_bytes()) {
            Ok(socket) => Some(socket),
            Err(e) => {
                tracing::warn!(address = %address.to_string_lossy(), "NOTIFY_SOCKET cannot be used: {e}");
                None
            }
        });
        Manager { socket }
    }

    /// The gateway serves. `status` is shown by `systemctl status`; one line.
    pub fn ready(&self, status: &str) {
        self.send(&format!("READY=1\nSTATUS={status}"));
    }

    /// A new configuration is being read; [`Manager::ready`] says that it is in effect. With the moment at which that
    /// began, as units with `Type=notify-reload` want it.
    pub fn reloading(&self) {
        let now = clock_gettime(ClockId::Monotonic);
        let us = now.tv_sec as u64 * 1_000_000 + now.tv_nsec as u64 / 1000;
        self.send(&format!("RELOADING=1\nMONOTONIC_USEC={us}"));
    }

    /// The drain has begun.
    pub fn stopping(&self) {
        self.send("STOPPING=1\nSTATUS=draining");
    }

    /// All lanes are alive.
    fn alive(&self) {
        self.send("WATCHDOG=1");
    }

    fn send(&self, text: &str) {
        let Some(socket) = &self.socket else { return };
        if let Err(e) = socket.send(text.as_bytes()) {
            tracing::warn!("the service manager could not be told {:?}: {e}", text.lines().next().unwrap_or_default());
        }
    }
}

fn connect(address: &[u8]) -> io::Result<UnixDatagram> {
    let address = match address {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        [b'/', ..] => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(address))?,
        _ => return Err(io::Error::new(io::ErrorKind::Unsupported, "neither a path nor an abstract name")),
    };
    let socket = UnixDatagram::unbound()?;
    socket.connect_addr(&address)?;
    socket.set_write_timeout(Some(SEND_TIMEOUT))?;
    Ok(socket)
}

/// Half of the time in which the manager wants a sign of life; `None`: it wants none from this process. `usec` and
/// `pid` are the texts of `WATCHDOG_USEC` and `WATCHDOG_PID`.
fn period(usec: Option<&str>, pid: Option<&str>, own_pid: u32) -> Option<Duration> {
    let usec: u64 = usec?.parse().ok().filter(|usec| *usec > 0)?;
    if pid.is_some_and(|pid| pid.parse() != Ok(own_pid)) {
        return None;
    }
    Some(Duration::from_micros(usec / 2))
}

/// Tells the manager again and again that the lanes are alive, from a thread of its own, for as long as the process
/// lives and they are.
pub fn keep_watch(manager: Manager, shared: &'static Shared) {
    let text = |name| std::env::var(name).ok();
    let wanted = period(text("WATCHDOG_USEC").as_deref(), text("WATCHDOG_PID").as_deref(), std::process::id());
    let Some(period) = wanted.filter(|_| manager.socket.is_some()) else { return };
    let watch = move || {
        let mut hearts = Hearts::new(shared.tallies.lanes().len(), period, Instant::now());
        let mut silent = None;
        loop {
            let beats = shared.tallies.lanes().iter().map(|lane| lane.beats.get());
            let now_silent = hearts.silent(Instant::now(), beats);
            match now_silent {
                None => manager.alive(),
                Some(lane) if silent != now_silent => {
                    tracing::error!(lane, "the lane gives no sign of life: the watchdog is not told that all is well");
                }
                Some(_) => {}
            }
            silent = now_silent;
            std::thread::sleep(period);
        }
    };
    if let Err(e) = std::thread::Builder::new().name("watchdog".into()).spawn(watch) {
        tracing::error!("the watchdog's thread could not be started, so the manager will end this process: {e}");
    }
}

/// When each lane was last seen to move.
struct Hearts {
    seen: Vec<(u64, Instant)>,
    patience: Duration,
}

impl Hearts {
    fn new(lanes: usize, period: Duration, now: Instant) -> Hearts {
        Hearts { seen: vec![(0, now); lanes], patience: period.max(LEAST_PATIENCE) }
    }

    /// The first lane whose count of beats has stood still for longer than the patience.
    fn silent(&mut self, now: Instant, beats: impl Iterator<Item = u64>) -> Option<usize> {
        for (seen, beats) in self.seen.iter_mut().zip(beats) {
            if seen.0 != beats {
                *seen = (beats, now);
            }
        }
        self.seen.iter().position(|(_, at)| now.duration_since(*at) > self.patience)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_watchdog_is_this_process_s_or_nobody_s() {
        assert_eq!(period(Some("10000000"), None, 7), Some(Duration::from_secs(5)));
        assert_eq!(period(Some("10000000"), Some("7"), 7), Some(Duration::from_secs(5)));
        for (usec, pid) in [(None, None), (Some("0"), None), (Some("x"), None), (Some("1"), Some("8"))] {
            assert_eq!(period(usec, pid, 7), None, "{usec:?} {pid:?}");
        }
    }

    #[test]
    fn one_lane_that_stands_still_is_enough() {
        let begun = Instant::now();
        let at = |ms| begun + Duration::from_millis(ms);
        let mut hearts = Hearts::new(2, Duration::from_secs(5), begun);
        assert_eq!(hearts.silent(at(0), [1, 1].into_iter()), None);
        assert_eq!(hearts.silent(at(5000), [9, 1].into_iter()), None, "the period has just passed");
        assert_eq!(hearts.silent(at(5001), [10, 1].into_iter()), Some(1));
        assert_eq!(hearts.silent(at(9000), [18, 2].into_iter()), None, "it moves again");
        assert_eq!(hearts.silent(at(14001), [18, 9].into_iter()), Some(0));
    }

    #[test]
    fn a_short_period_forgives_a_late_beat() {
        let begun = Instant::now();
        let mut hearts = Hearts::new(1, Duration::from_millis(1), begun);
        assert_eq!(hearts.silent(begun + LEAST_PATIENCE, [0].into_iter()), None);
        assert_eq!(hearts.silent(begun + LEAST_PATIENCE * 2, [0].into_iter()), Some(0));
    }

    #[test]
    fn the_manager_hears_everything_over_either_kind_of_socket() {
        let name = format!("corelane-notify-{}", std::process::id());
        let path = std::env::temp_dir().join(&name);
        let named = UnixDatagram::bind(&path).unwrap();
        let hidden = UnixDatagram::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        let addresses = [path.clone().into_os_string(), format!("@{name}").into()];
        for (address, socket) in addresses.into_iter().zip([named, hidden]) {
            let heard = || {
                let mut text = [0; 256];
                let n = socket.recv(&mut text).unwrap();
                String::from_utf8_lossy(&text[..n]).into_owned()
            };
            let manager = Manager::at(Some(address));
            manager.ready("serving");
            assert_eq!(heard(), "READY=1\nSTATUS=serving");
            let before = clock_gettime(ClockId::Monotonic).tv_sec;
            manager.reloading();
            let text = heard();
            let us: i64 = text.strip_prefix("RELOADING=1\nMONOTONIC_USEC=").expect(&text).parse().unwrap();
            assert!((before..before + 5).contains(&(us / 1_000_000)), "{text} at {before} s");
            manager.stopping();
            assert_eq!(heard(), "STOPPING=1\nSTATUS=draining");
            manager.alive();
            assert_eq!(heard(), "WATCHDOG=1");
        }
        let _ = std::fs::remove_file(path);
        for nobody in [None, Some("".into()), Some("relative".into()), Some("/no/such/socket".into())] {
            let manager = Manager::at(nobody);
            assert!(manager.socket.is_none());
            manager.ready("to nobody");
        }
    }
}
