//! Kernel and io_uring: whether lanes can have their rings, and which kind.
//!
//! Takes facts, gives findings. Never makes a ring itself: that one could be made is a fact.

use super::Plan;
use super::facts::Host;
use super::finding::Finding;

/// What came of making a ring: its flags, or one line that says what to change; `None`: not tried.
pub type Tried = Option<Result<&'static str, String>>;

/// First kernels with COOP_TASKRUN and buffer rings, and with DEFER_TASKRUN.
const LEAST: (u64, u64) = (5, 19);
const BEST: (u64, u64) = (6, 1);

pub fn check(host: &Host, _: &Plan, ring: &Tried) -> Vec<Finding> {
    [release(host), disabled(host, ring), made(ring)].into_iter().flatten().collect()
}

fn release(host: &Host) -> Option<Finding> {
    let text = host.release.as_deref()?;
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else { return None };
    let check = "kernel.release";
    Some(match (major, minor) {
        version if version < LEAST => Finding::fail(check, format!("Linux {text} is too old: 5.19 at least is needed"))
            .fix("install a kernel of 6.1 or newer"),
        version if version < BEST => {
            Finding::warning(check, format!("Linux {text} has no DEFER_TASKRUN, so rings interrupt their lanes"))
                .fix("install a kernel of 6.1 or newer")
        }
        _ => Finding::ok(check, format!("Linux {text}")),
    })
}

fn disabled(host: &Host, ring: &Tried) -> Option<Finding> {
    let check = "kernel.io_uring_disabled";
    let fix = "sudo sysctl -w kernel.io_uring_disabled=0";
    Some(match (host.io_uring_disabled?, ring) {
        (0, _) => Finding::ok(check, "kernel.io_uring_disabled is 0"),
        (1, Some(Ok(_))) => Finding::note(
            check,
            "kernel.io_uring_disabled is 1: this user may make rings, others need CAP_SYS_ADMIN or the group of \
             kernel.io_uring_group",
        ),
        (1, None) => Finding::warning(
            check,
            "kernel.io_uring_disabled is 1: only users with CAP_SYS_ADMIN or of the group kernel.io_uring_group may \
             make rings",
        )
        .fix(fix),
        (value, _) => Finding::fail(check, format!("kernel.io_uring_disabled is {value}: no rings")).fix(fix),
    })
}

fn made(ring: &Tried) -> Option<Finding> {
    let check = "kernel.ring";
    Some(match ring.as_ref()? {
        Ok(flags) => Finding::ok(check, format!("a ring could be made, with flags {flags}")),
        Err(line) => match line.rsplit_once(": ") {
            Some((what, fix)) => Finding::fail(check, what).fix(fix),
            None => Finding::fail(check, line),
        },
    })
}
