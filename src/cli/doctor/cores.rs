//! The lanes' cores: whether they can be had, and what else happens on them.
//!
//! Takes facts, gives findings. Never pins anything.

use std::collections::BTreeSet;

use super::Plan;
use super::facts::{Host, ranges};
use super::finding::Finding;
use crate::limits::MAX_LANES;

pub fn check(host: &Host, plan: &Plan) -> Vec<Finding> {
    let mut all = vec![lanes(host, plan), control(host, plan)];
    all.extend(
        [quota(host, plan), throttled(host), siblings(host, plan), nodes(host, plan), governor(host, plan)]
            .into_iter()
            .flatten(),
    );
    all
}

/// Why a core cannot be had.
fn missing(host: &Host, core: usize) -> String {
    if !host.cores.online.contains(&core) {
        format!("core {core} is not there, or offline")
    } else if host.cores.cpuset.as_ref().is_some_and(|set| !set.contains(&core)) {
        format!("core {core} is outside of the control group's cpuset")
    } else {
        format!("core {core} is outside of this process's affinity mask")
    }
}

fn lanes(host: &Host, plan: &Plan) -> Finding {
    let check = "cores.lanes";
    let allowed = ranges(&host.cores.allowed);
    let missing: Vec<String> =
        plan.lanes.iter().filter(|c| !host.cores.allowed.contains(c)).map(|c| missing(host, *c)).collect();
    if !missing.is_empty() {
        let fix = format!("--cores {allowed}, or change the taskset, AllowedCPUs= or CPUAffinity= that it runs under");
        return Finding::fail(check, format!("{}; it may use {allowed}", missing.join(", "))).fix(fix);
    }
    if plan.lanes.len() > MAX_LANES {
        return Finding::fail(check, format!("{} lanes are more than {MAX_LANES}", plan.lanes.len()))
            .fix("name fewer cores with --cores");
    }
    let seen = format!("{} lanes on cores {}, of {allowed}", plan.lanes.len(), ranges(&plan.lanes));
    Finding::ok(check, seen)
}

fn control(host: &Host, plan: &Plan) -> Finding {
    let check = "cores.control";
    match plan.control {
        Some(core) if !host.cores.allowed.contains(&core) => {
            Finding::fail(check, missing(host, core)).fix("change --control-core, or leave it out")
        }
        Some(core) if plan.lanes.contains(&core) => {
            Finding::warning(check, format!("the control thread shares core {core} with a lane, which waits for it"))
                .fix("give --control-core a core that is no lane's")
        }
        Some(core) => Finding::ok(check, format!("the control thread is on core {core}")),
        None => {
            let last = plan.lanes.last().copied().unwrap_or_default();
            let others: Vec<usize> = plan.lanes.iter().copied().filter(|c| *c != last).collect();
            let finding = Finding::note(check, "every core is a lane's: probes and metrics take time from some lane");
            match others.is_empty() {
                true => finding,
                false => finding.fix(format!("--cores {} --control-core {last}", ranges(&others))),
            }
        }
    }
}

fn quota(host: &Host, plan: &Plan) -> Option<Finding> {
    let check = "cores.quota";
    let lanes = plan.lanes.len() as f64;
    Some(match &host.cores.quota {
        None => Finding::ok(check, "the control group has no quota of CPU time"),
        Some((cores, file)) => {
            let seen = format!("the control group gives {cores:.2} cores of time, for {lanes} lanes ({file})");
            match *cores < lanes {
                true => Finding::warning(
                    check,
                    seen + ": once it is used up all lanes stand still to the end of the period",
                )
                .fix(format!(
                    "remove it (CPUQuota= empty, no CPU limit in the pod), or --cores with {} cores",
                    cores.floor().max(1.0)
                )),
                false => Finding::note(check, seen),
            }
        }
    })
}

fn throttled(host: &Host) -> Option<Finding> {
    let periods = host.cores.throttled;
    let seen = format!("the control group has run out of CPU time in {periods} periods since it was made");
    (periods > 0).then(|| Finding::warning("cores.throttled", seen).fix("raise or remove its quota of CPU time"))
}

fn siblings(host: &Host, plan: &Plan) -> Option<Finding> {
    let check = "cores.siblings";
    if host.cores.siblings.is_empty() {
        return None;
    }
    let of = |core: &usize| host.cores.siblings.get(core).cloned().unwrap_or_else(|| vec![*core]);
    let mut pairs = BTreeSet::new();
    for lane in &plan.lanes {
        let together: Vec<usize> = of(lane).into_iter().filter(|c| plan.lanes.contains(c)).collect();
        if together.len() > 1 {
            pairs.insert(ranges(&together));
        }
    }
    if !pairs.is_empty() {
        let mut taken = BTreeSet::new();
        let apart: Vec<usize> =
            plan.lanes.iter().copied().filter(|c| of(c).into_iter().all(|s| taken.insert(s))).collect();
        let seen = format!(
            "lanes share physical cores (SMT): {}; what one gets depends on what the other does",
            pairs.into_iter().collect::<Vec<_>>().join(" and ")
        );
        return Some(Finding::warning(check, seen).fix(format!("--cores {}", ranges(&apart))));
    }
    match plan.control.filter(|control| of(control).iter().any(|c| plan.lanes.contains(c))) {
        Some(core) => {
            Some(Finding::note(check, format!("core {core} of the control thread is a sibling (SMT) of a lane's")))
        }
        None => Some(Finding::ok(check, "no two lanes share a physical core")),
    }
}

fn nodes(host: &Host, plan: &Plan) -> Option<Finding> {
    let check = "cores.nodes";
    if host.cores.nodes.len() < 2 {
        return None;
    }
    let nodes: BTreeSet<usize> = plan.lanes.iter().filter_map(|c| host.cores.node_of(*c)).collect();
    let shown = nodes.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
    let near = host.nics.iter().find_map(|nic| nic.node).filter(|n| nodes.contains(n)).or(nodes.first().copied());
    let Some(near) = near.filter(|_| nodes.len() > 1) else {
        return Some(Finding::ok(check, format!("all lanes are on NUMA node {shown}")));
    };
    let stay: Vec<usize> = plan.lanes.iter().copied().filter(|c| host.cores.node_of(*c) == Some(near)).collect();
    let seen = format!("lanes are on NUMA nodes {shown}: what they share crosses the link between sockets");
    let fix = format!("--cores {}; tuning/examples/two-sockets.toml says why", ranges(&stay));
    Some(Finding::warning(check, seen).fix(fix))
}

fn governor(host: &Host, plan: &Plan) -> Option<Finding> {
    let check = "cores.governor";
    let slow: Vec<(usize, &String)> = plan
        .lanes
        .iter()
        .filter_map(|core| Some((*core, host.cores.governors.get(core)?)))
        .filter(|(_, governor)| *governor != "performance")
        .collect();
    let Some((_, name)) = slow.first() else {
        let seen = match host.cores.governors.is_empty() {
            true => "no frequency scaling: the firmware or the hypervisor sets the clock",
            false => "the lanes' cores are governed by performance",
        };
        return Some(Finding::ok(check, seen));
    };
    let cores: Vec<usize> = slow.iter().map(|(core, _)| *core).collect();
    let seen = format!("cores {} are governed by {name}: they clock down between events", ranges(&cores));
    Some(Finding::warning(check, seen).fix(format!("sudo cpupower -c {} frequency-set -g performance", ranges(&cores))))
}
