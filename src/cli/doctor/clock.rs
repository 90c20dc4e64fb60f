//! Clocks, and the size of pages.
//!
//! Takes facts, gives findings. Never sets anything.

use super::Plan;
use super::facts::Host;
use super::finding::Finding;

/// Clocks that a process reads without a system call.
const FAST: [&str; 4] = ["tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter"];
/// Programs that keep a clock right.
const KEEPERS: [&str; 6] = ["chronyd", "ntpd", "systemd-timesyncd", "ptp4l", "phc2sys", "openntpd"];

pub fn check(host: &Host, _: &Plan) -> Vec<Finding> {
    [source(host), keeper(host), huge_pages(host)].into_iter().flatten().collect()
}

fn source(host: &Host) -> Option<Finding> {
    let check = "clock.source";
    let is = host.clock.as_deref()?;
    if FAST.contains(&is) {
        return Some(Finding::ok(check, format!("the clock is {is}")));
    }
    let finding = Finding::warning(check, format!("the clock is {is}: reading it is a system call, and slow"));
    let better = host.clocks.iter().find(|clock| FAST.contains(&clock.as_str()));
    let file = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
    Some(match better {
        Some(better) => finding.fix(format!("echo {better} | sudo tee {file}")),
        None => finding.fix("look in dmesg for why the kernel distrusts tsc"),
    })
}

fn keeper(host: &Host) -> Option<Finding> {
    let check = "clock.sync";
    if host.processes.is_empty() {
        return None;
    }
    Some(match KEEPERS.iter().find(|keeper| host.runs(keeper)) {
        Some(keeper) => Finding::ok(check, format!("{keeper} keeps the time")),
        None => Finding::note(check, "no program that keeps the time was seen: logs of hosts will not fit together")
            .fix("sudo apt-get install chrony (or dnf); within a container or a virtual machine the host may do it"),
    })
}

fn huge_pages(host: &Host) -> Option<Finding> {
    let check = "memory.huge_pages";
    let is = host.huge_pages.as_deref()?;
    Some(match is {
        "always" => Finding::note(check, "transparent huge pages are always tried: memory can grow in steps of 2 MiB")
            .fix("echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"),
        _ => Finding::ok(check, format!("transparent huge pages: {is}")),
    })
}
