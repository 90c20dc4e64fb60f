//! Network cards against lanes: which cores their queues interrupt, on which node they sit, what spreads packets.
//!
//! Takes facts, gives findings. Never changes a card: `tuning/nic.sh` does.

use std::collections::BTreeSet;

use super::Plan;
use super::facts::nics::Nic;
use super::facts::{Host, ranges};
use super::finding::Finding;

pub fn check(host: &Host, plan: &Plan) -> Vec<Finding> {
    let mut all: Vec<Finding> = host
        .nics
        .iter()
        .flat_map(|nic| {
            [node(host, plan, nic), affinity(host, plan, nic), queues(plan, nic), rps(plan, nic), xps(plan, nic)]
        })
        .flatten()
        .collect();
    all.extend(irqbalance(host, plan));
    all
}

/// The command that shows what it would do to a card before it does anything.
fn nic_sh(plan: &Plan, nic: &Nic) -> String {
    format!("sh tuning/nic.sh show {} {}, then apply instead of show", nic.name, ranges(&plan.lanes))
}

fn node(host: &Host, plan: &Plan, nic: &Nic) -> Option<Finding> {
    let check = "interrupts.node";
    let node = nic.node.filter(|node| host.cores.nodes.len() > 1 && host.cores.nodes.contains_key(node))?;
    let far: Vec<usize> =
        plan.lanes.iter().copied().filter(|c| host.cores.node_of(*c).is_some_and(|n| n != node)).collect();
    if far.is_empty() {
        return Some(Finding::ok(check, format!("{} and the lanes are on NUMA node {node}", nic.name)));
    }
    let seen = format!("{} is on NUMA node {node}, lanes on cores {} are not", nic.name, ranges(&far));
    Some(Finding::warning(check, seen).fix(format!("--cores with some of {}", ranges(&host.cores.nodes[&node]))))
}

fn affinity(host: &Host, plan: &Plan, nic: &Nic) -> Option<Finding> {
    let check = "interrupts.affinity";
    if nic.interrupts.is_empty() {
        return Some(Finding::note(check, format!("no interrupts of {} were found", nic.name)));
    }
    let cores: BTreeSet<usize> = nic.interrupts.iter().flat_map(|i| i.cores.iter().copied()).collect();
    let shown = ranges(&cores.iter().copied().collect::<Vec<_>>());
    let n = nic.interrupts.len();
    let far = nic.node.filter(|node| cores.iter().any(|c| host.cores.node_of(*c).is_some_and(|n| n != *node)));
    let on_lanes: Vec<usize> = plan.lanes.iter().copied().filter(|c| cores.contains(c)).collect();
    let seen = format!("{n} interrupts of {} go to cores {shown}", nic.name);
    Some(if let Some(node) = far.filter(|_| host.cores.nodes.len() > 1) {
        Finding::warning(check, format!("{seen}, some of which are not on its NUMA node {node}")).fix(nic_sh(plan, nic))
    } else if n > 1 && cores.len() == 1 && plan.lanes.len() > 1 {
        Finding::warning(check, format!("{seen}: one core does it all")).fix(nic_sh(plan, nic))
    } else if !on_lanes.is_empty() && on_lanes.len() < plan.lanes.len() {
        let numbers: Vec<usize> = nic
            .interrupts
            .iter()
            .filter(|i| i.cores.iter().any(|c| on_lanes.contains(c)))
            .map(|i| i.number as usize)
            .collect();
        let which = format!(
            "; lanes on {} have less time than the others (interrupts {})",
            ranges(&on_lanes),
            ranges(&numbers)
        );
        Finding::note(check, seen + &which).fix(nic_sh(plan, nic))
    } else {
        Finding::ok(check, seen)
    })
}

fn queues(plan: &Plan, nic: &Nic) -> Option<Finding> {
    let (check, lanes) = ("interrupts.queues", plan.lanes.len());
    let seen = format!("{} has {} receive queues for {lanes} lanes", nic.name, nic.rx_queues);
    if nic.rx_queues == 0 {
        return None;
    }
    Some(match nic.rx_queues < lanes {
        true => Finding::note(check, seen).fix(format!("sudo ethtool -L {} combined {lanes}", nic.name)),
        false => Finding::ok(check, seen),
    })
}

fn rps(plan: &Plan, nic: &Nic) -> Option<Finding> {
    let check = "interrupts.rps";
    match (nic.has_rps, nic.rx_queues < plan.lanes.len()) {
        _ if nic.rx_queues == 0 => None,
        (true, false) => Some(
            Finding::note(
                check,
                format!("{} passes packets on to other cores (RPS) although it has a queue for each lane", nic.name),
            )
            .fix(nic_sh(plan, nic)),
        ),
        (false, true) if plan.lanes.len() > 1 => Some(
            Finding::note(
                check,
                format!("{} has fewer queues than lanes and RPS is off: few cores receive for all", nic.name),
            )
            .fix(nic_sh(plan, nic)),
        ),
        _ => Some(Finding::ok(check, format!("RPS of {} is {}", nic.name, if nic.has_rps { "on" } else { "off" }))),
    }
}

fn xps(plan: &Plan, nic: &Nic) -> Option<Finding> {
    let check = "interrupts.xps";
    if nic.tx_queues < 2 {
        return None;
    }
    Some(match nic.has_xps {
        true => Finding::ok(check, format!("cores have send queues of {} of their own (XPS)", nic.name)),
        false => {
            Finding::note(check, format!("cores share the {} send queues of {} (no XPS)", nic.tx_queues, nic.name))
                .fix(nic_sh(plan, nic))
        }
    })
}

fn irqbalance(host: &Host, plan: &Plan) -> Option<Finding> {
    host.runs("irqbalance").then(|| {
        Finding::warning("interrupts.irqbalance", "irqbalance runs: it moves interrupts onto lanes and back").fix(
            format!(
                "sudo systemctl disable --now irqbalance, or IRQBALANCE_BANNED_CPULIST={} in /etc/default/irqbalance",
                ranges(&plan.lanes)
            ),
        )
    })
}
