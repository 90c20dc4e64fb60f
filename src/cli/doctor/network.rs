//! The kernel's TCP: queues of connections that wait, and local ports for those to workers.
//!
//! Takes facts, gives findings. Never sets a sysctl: `tuning/sysctl.conf` has them.

use super::Plan;
use super::facts::Host;
use super::finding::{Finding, Level};

pub fn check(host: &Host, plan: &Plan) -> Vec<Finding> {
    let backlog = u64::from(plan.config.backlog);
    let mut all = Vec::new();
    all.extend(host.somaxconn.map(|is| {
        at_least("network.somaxconn", "net.core.somaxconn", is, backlog, Level::Warning, "the kernel caps it silently")
    }));
    all.extend(host.max_syn_backlog.map(|is| {
        let why = "beyond it the kernel answers with SYN cookies or not at all";
        at_least("network.syn_backlog", "net.ipv4.tcp_max_syn_backlog", is, backlog, Level::Note, why)
    }));
    all.extend([local_ports(host, plan), own_ports(host, plan), reuse(host)].into_iter().flatten());
    all
}

fn at_least(check: &'static str, name: &str, is: u64, backlog: u64, level: Level, why: &str) -> Finding {
    let seen = format!("{name} is {is}, backlog {backlog}");
    match is < backlog {
        true => Finding::new(level, check, format!("{seen}: {why}")).fix(format!("sudo sysctl -w {name}={backlog}")),
        false => Finding::ok(check, seen),
    }
}

fn local_ports(host: &Host, plan: &Plan) -> Option<Finding> {
    let check = "network.local_ports";
    let (first, last) = host.local_ports?;
    let in_range = |port: &&usize| (usize::from(first)..=usize::from(last)).contains(*port);
    let ports =
        (u64::from(last) + 1).saturating_sub(first.into()) - host.reserved_ports.iter().filter(in_range).count() as u64;
    let seen = format!("{ports} local ports ({first} to {last}), so as many connections to one worker");
    let fix = "sudo sysctl -w net.ipv4.ip_local_port_range=\"10240 65535\" (and the ports that the gateway listens on in \
               net.ipv4.ip_local_reserved_ports)";
    let config = plan.config;
    // Spread evenly, which the policies that look at load come close to.
    let clients = (u64::from(config.max_connections_per_lane) * plan.lanes.len() as u64)
        .div_ceil(config.workers.len().max(1) as u64);
    let bounds = [u64::from(config.max_requests_per_worker), u64::from(config.max_concurrent_requests), clients];
    Some(match bounds.into_iter().filter(|n| *n > 0).min() {
        Some(most) if most > ports => Finding::warning(
            check,
            format!("{seen}; the configuration allows {most} requests at a worker: those beyond get 503"),
        )
        .fix(fix),
        Some(most) => Finding::ok(check, format!("{seen}; the configuration allows {most} requests at a worker")),
        None if ports < 16 * 1024 => Finding::warning(check, seen).fix(fix),
        None => Finding::ok(check, seen),
    })
}

fn own_ports(host: &Host, plan: &Plan) -> Option<Finding> {
    let check = "network.own_ports";
    let (first, last) = host.local_ports?;
    let given = |port: &u16| (first..=last).contains(port) && !host.reserved_ports.contains(&usize::from(*port));
    let ours = [plan.config.port, plan.config.metrics_port];
    let risky: Vec<String> = ours.iter().filter(|p| given(p)).map(u16::to_string).collect();
    if risky.is_empty() {
        return Some(Finding::ok(check, "the kernel gives the gateway's ports to no connection"));
    }
    let seen = format!(
        "port {} lies within net.ipv4.ip_local_port_range: while a connection has it the gateway cannot start",
        risky.join(" and ")
    );
    let fix = format!("sudo sysctl -w net.ipv4.ip_local_reserved_ports={}", risky.join(","));
    Some(Finding::warning(check, seen).fix(fix))
}

fn reuse(host: &Host) -> Option<Finding> {
    let check = "network.tw_reuse";
    Some(match host.tw_reuse? {
        1 => {
            Finding::ok(check, "net.ipv4.tcp_tw_reuse is 1: ports of closed connections are taken again after a second")
        }
        value => Finding::note(
            check,
            format!("net.ipv4.tcp_tw_reuse is {value}: to other hosts a closed connection keeps its port for a minute"),
        )
        .fix("sudo sysctl -w net.ipv4.tcp_tw_reuse=1"),
    })
}
