//! Limits of the process and of its user: open files, locked memory, pipes.
//!
//! Takes facts, gives findings. Never raises a limit.

use super::Plan;
use super::facts::{Host, Limit};
use super::finding::Finding;
use crate::boot::host::{LANE_FILES, OWN_FILES, share};
use crate::limits::{LANE_LOCKED_BYTES, PIPE_BYTES};

/// Below so many open files `serve` warns, too.
const FEW_FILES: u64 = 8192;
/// Of linux/capability.h: whoever has them is not bound by the limits of locked memory and of pipes.
const CAP_IPC_LOCK: u32 = 14;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_SYS_RESOURCE: u32 = 24;
/// A page of a pipe, in bytes.
const PAGE: u64 = 4096;
/// Shown instead of a number.
const UNLIMITED: &str = "unlimited";

pub fn check(host: &Host, plan: &Plan) -> Vec<Finding> {
    [files(host, plan), locked(host, plan), pipe_size(host, plan), pipe_pages(host, plan)]
        .into_iter()
        .flatten()
        .collect()
}

fn shown(n: u64) -> String {
    if n == u64::MAX { UNLIMITED.to_owned() } else { n.to_string() }
}

fn files(host: &Host, plan: &Plan) -> Option<Finding> {
    let check = "limits.files";
    let Limit { soft, hard } = host.files?;
    let lanes = plan.lanes.len().max(1);
    let pipes = 2 * plan.pipes();
    let own = (OWN_FILES + LANE_FILES * lanes) as u64;
    let asked = u64::from(plan.config.max_connections_per_lane) * lanes as u64;
    let needed = own + pipes + 2 * asked;
    let mut seen = format!("{} open files (soft limit {}; it is raised at start)", shown(hard), shown(soft));
    let raise = |n: u64| {
        let n = n.next_power_of_two().max(1 << 16);
        format!("LimitNOFILE={n} in the unit, or as root before the start: ulimit -n {n}")
    };
    if hard < own {
        seen += &format!(": {lanes} lanes need {own} before the first connection");
        return Some(Finding::fail(check, seen).fix(raise(needed)));
    }
    if asked > 0 && hard < needed {
        seen += &format!(
            ": {asked} client connections (max_connections_per_lane times {lanes} lanes) want one to a worker each, \
             {pipes} are for pipes, {own} for the lanes: {needed} in all"
        );
        return Some(Finding::warning(check, seen).fix(raise(needed)));
    }
    let clients = match asked {
        0 if hard == u64::MAX => UNLIMITED.to_owned(),
        0 => format!("{}", u64::from(share(Some(hard), lanes)) * lanes as u64),
        asked => asked.to_string(),
    };
    seen += &format!(": {clients} client connections");
    Some(match hard < FEW_FILES {
        true => Finding::warning(check, seen).fix(raise(FEW_FILES)),
        false => Finding::ok(check, seen),
    })
}

fn locked(host: &Host, plan: &Plan) -> Option<Finding> {
    let check = "limits.locked_memory";
    let Limit { hard, soft } = host.locked?;
    let needed = LANE_LOCKED_BYTES * plan.lanes.len() as u64;
    let kib = |bytes: u64| if bytes == u64::MAX { UNLIMITED.to_owned() } else { format!("{} KiB", bytes / 1024) };
    let seen = format!("{} of locked memory, {} for {} lanes", kib(soft), kib(needed), plan.lanes.len());
    if host.has_capability(CAP_IPC_LOCK) {
        return Some(Finding::ok(check, seen + "; this user is not bound by it"));
    }
    let enough = needed.max(64 << 20).next_power_of_two();
    let fix =
        format!("LimitMEMLOCK={}M in the unit, or as root before the start: ulimit -l {}", enough >> 20, enough >> 10);
    Some(match soft < needed {
        true if hard < needed => Finding::fail(check, seen).fix(fix),
        true => Finding::fail(check, seen).fix(format!("ulimit -l {}", needed >> 10)),
        false => Finding::ok(check, seen),
    })
}

fn pipe_size(host: &Host, plan: &Plan) -> Option<Finding> {
    let check = "limits.pipe_size";
    let (max, asked) = (host.pipe_max_size?, plan.config.pipe_bytes as u64);
    if plan.pipes() == 0 {
        return None;
    }
    let seen = format!("fs.pipe-max-size is {max}, pipe_size {asked}");
    Some(match asked > max && !host.has_capability(CAP_SYS_RESOURCE) {
        true => Finding::warning(check, seen + ": pipes will be smaller than configured")
            .fix(format!("sudo sysctl -w fs.pipe-max-size={}", asked.next_power_of_two())),
        false => Finding::ok(check, seen),
    })
}

fn pipe_pages(host: &Host, plan: &Plan) -> Option<Finding> {
    let check = "limits.pipe_pages";
    let soft = host.pipe_user_pages_soft?;
    let bytes = plan.config.pipe_bytes.next_power_of_two() as u64;
    let needed = plan.pipes() * bytes.div_ceil(PAGE);
    if needed == 0 {
        return None;
    }
    let seen =
        format!("{} pipes of {} KiB are {needed} pages, fs.pipe-user-pages-soft is {soft}", plan.pipes(), bytes / 1024);
    let is_bound = !host.has_capability(CAP_SYS_RESOURCE) && !host.has_capability(CAP_SYS_ADMIN);
    if soft == 0 || needed <= soft || !is_bound {
        let why = if is_bound { "" } else { "; this user is not bound by it" };
        return Some(Finding::ok(check, seen + why));
    }
    let fit = soft * PAGE / (plan.lanes.len() as u64 * PIPE_BYTES as u64);
    Some(Finding::warning(check, seen + ": beyond it what is large is copied, or spliced through smaller pipes").fix(
        format!(
            "sudo sysctl -w fs.pipe-user-pages-soft={needed} (or --pipes-per-lane {} --pipe-size 64KiB)",
            fit.min(plan.config.pipes_per_lane as u64)
        ),
    ))
}
