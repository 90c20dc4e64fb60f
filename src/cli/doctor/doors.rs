//! The gateway's two listeners: are their ports free, and who could reach them.
//!
//! Takes facts, gives findings. Never binds a port itself.

use std::io::ErrorKind;

use super::Plan;
use super::facts::doors::Door;
use super::finding::Finding;

/// The listener of clients and that of metrics, tried; `None`: not tried.
pub type Tried = Option<(Door, Door)>;

pub fn check(plan: &Plan, tried: &Tried) -> Vec<Finding> {
    let mut all = Vec::new();
    if let Some((clients, admin)) = tried {
        let config = plan.config;
        all.push(door("listeners.clients", format!("{}:{}", config.host, config.port), "--port", clients));
        let address = format!("{}:{}", config.metrics_host, config.metrics_port);
        all.push(door("listeners.admin", address, "--prometheus-port", admin));
    }
    all.push(exposure_of_admin(plan));
    all.extend(exposure_of_clients(plan));
    all
}

fn door(check: &'static str, address: String, option: &str, door: &Door) -> Finding {
    match door {
        Door::Free => Finding::ok(check, format!("{address} is free")),
        Door::Ours => Finding::note(check, format!("a corelane has {address} already; a second one could not start")),
        Door::Taken => Finding::fail(check, format!("{address} is taken, and not by a corelane"))
            .fix(format!("sudo ss -tlnp 'sport = :{}' tells by whom; or change {option}", port_of(&address))),
        Door::Refused(e) => {
            let fix = match e.kind() {
                ErrorKind::PermissionDenied => {
                    "use a port above 1023, or AmbientCapabilities=CAP_NET_BIND_SERVICE in the unit"
                }
                ErrorKind::AddrNotAvailable => {
                    "no interface of this host has the address: ip -brief address lists them"
                }
                _ => "change the address or the port",
            };
            Finding::fail(check, format!("{address} cannot be listened on: {e}")).fix(fix)
        }
    }
}

fn port_of(address: &str) -> &str {
    address.rsplit(':').next().unwrap_or_default()
}

fn exposure_of_admin(plan: &Plan) -> Finding {
    let (check, host) = ("listeners.admin_exposure", plan.config.metrics_host);
    if host.is_loopback() {
        return Finding::ok(check, format!("the admin listener is on {host}: only this host reaches it"));
    }
    if plan.config.admin_token.is_some() {
        return Finding::ok(check, format!("the admin listener is on {host}, and asks for its token"));
    }
    let seen =
        format!("the admin listener is on {host}, without a token: whoever reaches it can add and remove workers");
    Finding::warning(check, seen).fix("--admin-token, or --prometheus-host 127.0.0.1")
}

fn exposure_of_clients(plan: &Plan) -> Option<Finding> {
    let (check, config) = ("listeners.keys", plan.config);
    if config.host.is_loopback() || !config.api_keys.is_empty() {
        return None;
    }
    let seen = format!("clients of {}:{} need no key", config.host, config.port);
    Some(match config.workers.iter().any(|worker| worker.api_key.is_some()) {
        true => Finding::warning(check, seen + ", and use the workers' own keys")
            .fix("CORELANE_API_KEY=… in the unit's environment, or a proxy that checks who they are"),
        false => Finding::note(check, seen),
    })
}
