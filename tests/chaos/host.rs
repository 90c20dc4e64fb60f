//! The gateway as its host sees it: a process with workers that are processes too, or that misbehave by trade.
//!
//! Takes what chaos needs of a fleet, gives a running gateway and what stands of it in /proc and on its admin listener.
//! Never ends a process that it did not start.

use std::net::SocketAddr;
use std::path::PathBuf;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::children::{self, Process, TempFile, lasting_ports, two_cores, until};
use crate::rig::Http;

/// Mock engines in a process of their own, which can be killed, frozen and started again on the same ports.
pub struct Engines {
    port: u16,
    ports: u16,
    args: Vec<String>,
    process: Option<Process>,
}

impl Engines {
    pub fn start(ports: u16, args: &[&str]) -> Engines {
        let args = args.iter().map(|a| (*a).to_owned()).collect();
        let mut engines = Engines { port: lasting_ports(ports), ports, args, process: None };
        engines.revive();
        engines
    }

    /// What they are called by the gateway, all of them.
    pub fn urls(&self) -> impl Iterator<Item = String> {
        (0..self.ports).map(|i| self.url(i))
    }

    pub fn url(&self, i: u16) -> String {
        format!("http://127.0.0.1:{}", self.port + i)
    }

    pub fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        (self.port..self.port + self.ports).map(|port| SocketAddr::from(([127, 0, 0, 1], port)))
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.process = None;
    }

    pub fn revive(&mut self) {
        let args: Vec<&str> = self.args.iter().map(String::as_str).collect();
        self.process = Some(children::worker(self.port, &args).0);
    }

    pub fn signal(&self, signal: Signal) {
        let process = self.process.as_ref().expect("it lives");
        kill_process(Pid::from_child(&process.child), signal).unwrap();
    }
}

/// The gateway's process.
pub struct Host {
    process: Process,
    pub address: SocketAddr,
    pub admin: SocketAddr,
    _config: Option<TempFile>,
}

impl Host {
    /// Starts it with `tables` as its file and waits until `workers` are usable.
    pub fn start(tables: &str, args: &[&str], workers: u64) -> Host {
        let file = TempFile::new("chaos.toml", tables);
        let cores = two_cores();
        let mut all =
            vec!["serve", "--config", file.name(), "--port", "0", "--prometheus-port", "0", "--cores", &cores];
        all.extend(args);
        let mut process = Process::start(children::command(&all));
        let (address, admin) = (process.announced("address"), process.announced("admin"));
        let host = Host { process, address, admin, _config: Some(file) };
        until("every worker is usable", || {
            host.workers().iter().filter(|w| w["state"] == "ready").count() as u64 == workers
        });
        host
    }

    fn proc(&self, file: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{file}", self.process.child.id()))
    }

    /// Descriptors that it has open.
    pub fn descriptors(&self) -> u64 {
        std::fs::read_dir(self.proc("fd")).expect("it runs").count() as u64
    }

    /// A number of /proc/PID/status: kB, or a count.
    pub fn status(&self, name: &str) -> u64 {
        let page = std::fs::read_to_string(self.proc("status")).expect("it runs");
        let line = page.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':')).expect("Linux shows it");
        line.split_whitespace().next().unwrap().parse().unwrap()
    }

    /// The worker list of the admin listener.
    pub fn workers(&self) -> Vec<Value> {
        let v = Http::connect(self.admin).ask("GET", "/workers", &[], b"").expect(200).json();
        v["workers"].as_array().expect("a list").clone()
    }

    /// Requests that some engines have now, and how often they were chosen.
    pub fn load(&self, engines: &Engines) -> (u64, u64) {
        let workers = self.workers();
        let urls: Vec<String> = engines.urls().collect();
        let ours = workers.iter().filter(|w| urls.iter().any(|url| w["url"] == url.as_str()));
        ours.fold((0, 0), |(now, ever), w| {
            (now + w["in_flight"].as_u64().unwrap(), ever + w["selected_total"].as_u64().unwrap())
        })
    }

    /// A metric, summed over those of its samples that have `label` in them.
    pub fn metric(&self, name: &str, label: &str) -> f64 {
        let page = Http::connect(self.admin).ask("GET", "/metrics", &[], b"").expect(200).text();
        let mut samples = page.lines().filter_map(|line| {
            let rest = line.strip_prefix(name)?;
            let labels = rest.starts_with('{') || rest.starts_with(' ');
            (labels && rest.contains(label)).then(|| rest.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
        });
        let first = samples.next().unwrap_or_else(|| panic!("no {name} with {label:?} in\n{page}"));
        first + samples.sum::<f64>()
    }

    /// What it has written.
    pub fn log(&self) -> String {
        self.process.log()
    }
}
