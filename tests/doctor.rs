//! `corelane doctor`: every finding about a host on a prepared tree of `/proc` and `/sys`, and the program on this host.
//!
//! Takes the built binary, gives verdicts on its findings and exit codes. Never changes this host.

mod children;
mod host;

use std::io::Write;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Command, Output};

use children::{Process, command, gateway, mask, worker};
use host::Tree;
use serde_json::Value;

/// `doctor --json`.
fn doctor(args: &[&str]) -> Command {
    let mut command = command(&["doctor", "--json"]);
    command.args(args);
    command
}

/// What `doctor` says of a prepared host.
fn diagnose(tree: &Tree, more: &[&str]) -> Diagnosis {
    let mut args = vec!["--root", tree.0.to_str().unwrap(), "--cores", "0-3", "--control-core", "4"];
    args.extend(["--worker-urls", "http://10.0.0.1:30000"]);
    args.extend(more);
    Diagnosis::of(doctor(&args))
}

/// What `doctor` said.
struct Diagnosis {
    exit: i32,
    said: Value,
}

impl Diagnosis {
    #[track_caller]
    fn of(mut command: Command) -> Diagnosis {
        let Output { status, stdout, stderr } = command.output().unwrap();
        let said =
            serde_json::from_slice(&stdout).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&stderr)));
        let diagnosis = Diagnosis { exit: status.code().unwrap(), said };
        assert_eq!(diagnosis.said["exit"], diagnosis.exit);
        diagnosis
    }

    fn findings(&self) -> &[Value] {
        self.said["findings"].as_array().unwrap()
    }

    /// Checks and levels of all that is not well.
    fn bad(&self) -> Vec<(&str, &str)> {
        let all = self.findings().iter().map(|f| (f["check"].as_str().unwrap(), f["level"].as_str().unwrap()));
        all.filter(|(_, level)| *level != "ok").collect()
    }

    /// The only finding of a check that is at a level.
    #[track_caller]
    fn says(&self, check: &str, level: &str) -> String {
        let found = self.findings().iter().find(|f| f["check"] == check && f["level"] == level);
        let found = found.unwrap_or_else(|| panic!("no {level} of {check}: {:#}", self.said));
        format!("{} → {}", found["seen"].as_str().unwrap(), found["fix"].as_str().unwrap_or_default())
    }
}

#[test]
fn a_good_host_has_nothing_but_ok() {
    let tree = Tree::new("good");
    let diagnosis = diagnose(&tree, &["--strict"]);
    assert_eq!(diagnosis.bad(), []);
    assert_eq!(diagnosis.exit, 0);
    for check in [
        "kernel.release",
        "kernel.io_uring_disabled",
        "limits.files",
        "limits.locked_memory",
        "limits.pipe_size",
        "limits.pipe_pages",
        "cores.lanes",
        "cores.control",
        "cores.quota",
        "cores.siblings",
        "cores.nodes",
        "cores.governor",
        "interrupts.node",
        "interrupts.affinity",
        "interrupts.queues",
        "interrupts.rps",
        "interrupts.xps",
        "network.somaxconn",
        "network.syn_backlog",
        "network.local_ports",
        "network.own_ports",
        "network.tw_reuse",
        "clock.source",
        "clock.sync",
        "memory.huge_pages",
        "listeners.admin_exposure",
    ] {
        diagnosis.says(check, "ok");
    }
}

/// One thing that is wrong: files that differ, arguments, the check that sees it, its level, words of it.
type Case<'a> = (&'a [(&'a str, &'a str)], &'a [&'a str], &'a str, &'a str, &'a [&'a str]);

const GROUP: &str = "sys/fs/cgroup/system.slice/corelane.service";

#[track_caller]
fn told(name: &str, cases: &[Case]) {
    for (n, (files, args, check, level, words)) in cases.iter().enumerate() {
        let tree = Tree::new(&format!("{name}-{n}"));
        for (path, text) in *files {
            tree.put(&path.replace("GROUP", GROUP), text);
        }
        let diagnosis = diagnose(&tree, args);
        assert_eq!(diagnosis.bad(), [(*check, *level)], "{files:?} {args:?}");
        assert_eq!(diagnosis.exit, if *level == "fail" { 2 } else { 0 });
        let line = diagnosis.says(check, level);
        for word in *words {
            assert!(line.contains(word), "{word}: {line}");
        }
        if *level == "warning" {
            let strict: Vec<&str> = args.iter().copied().chain(["--strict"]).collect();
            assert_eq!(diagnose(&tree, &strict).exit, 1);
        }
    }
}

#[test]
fn kernels_that_lack_something_are_told() {
    let release = "proc/sys/kernel/osrelease";
    let disabled = "proc/sys/kernel/io_uring_disabled";
    told(
        "kernel",
        &[
            (&[(release, "5.15.0-116-generic")], &[], "kernel.release", "fail", &["too old", "6.1 or newer"]),
            (&[(release, "5.19.17")], &[], "kernel.release", "warning", &["DEFER_TASKRUN"]),
            (&[(disabled, "2")], &[], "kernel.io_uring_disabled", "fail", &["sysctl -w kernel.io_uring_disabled=0"]),
            (&[(disabled, "1")], &[], "kernel.io_uring_disabled", "warning", &["kernel.io_uring_group"]),
        ],
    );
}

#[test]
fn short_limits_are_told_against_what_is_configured() {
    let limits =
        |files: &str, locked: &str| format!("Max open files  {files}  files\nMax locked memory  {locked}  bytes\n");
    let file = "proc/self/limits";
    let pages = "proc/sys/fs/pipe-user-pages-soft";
    let (locked, files) = ("67108864 67108864", "1024 1048576");
    told(
        "limits",
        &[
            (&[(file, &limits("1024 4096", locked))], &[], "limits.files", "warning", &["4096", "LimitNOFILE=65536"]),
            (&[(file, &limits("40 40", locked))], &[], "limits.files", "fail", &["4 lanes need 48"]),
            (
                &[(file, &limits("1024 32768", locked))],
                &["--max-connections-per-lane", "5000"],
                "limits.files",
                "warning",
                &["20000 client connections", "512 are for pipes", "40560 in all", "LimitNOFILE=65536"],
            ),
            (
                &[(file, &limits(files, "65536 65536"))],
                &[],
                "limits.locked_memory",
                "fail",
                &["64 KiB", "LimitMEMLOCK=64M"],
            ),
            (
                &[(pages, "16384")],
                &[],
                "limits.pipe_pages",
                "warning",
                &["256 pipes", "soft=65536", "--pipes-per-lane 64"],
            ),
            (
                &[("proc/sys/fs/pipe-max-size", "65536")],
                &[],
                "limits.pipe_size",
                "warning",
                &["smaller", "sysctl -w fs.pipe-max-size=1048576"],
            ),
        ],
    );
    // Who is not bound by a limit is not told of it.
    let tree = Tree::new("root");
    tree.put("proc/self/status", "CapEff:\t000001ffffffffff\nCpus_allowed_list:\t0-7\n");
    tree.put(file, &limits("unlimited unlimited", "65536 65536"));
    tree.put(pages, "16384");
    assert_eq!(diagnose(&tree, &[]).bad(), []);
    tree.put("proc/sys/fs/pipe-user-pages-soft", "1");
    tree.put("proc/self/status", "CapEff:\t0\nCpus_allowed_list:\t0-7\n");
    tree.put(file, &limits(files, locked));
    assert_eq!(diagnose(&tree, &["--pipes-per-lane", "0"]).bad(), []);
}

#[test]
fn cores_that_cannot_be_had_or_are_shared_are_told() {
    let cpu = "sys/devices/system/cpu";
    let status = "proc/self/status";
    let allowed = "CapEff:\t0\nCpus_allowed_list:\t0-2,4-7\n";
    told(
        "cores",
        &[
            (
                &[(status, allowed)],
                &[],
                "cores.lanes",
                "fail",
                &["core 3 is outside of this process's affinity mask", "--cores 0-2,4-7"],
            ),
            (
                &[(status, allowed), ("GROUP/cpuset.cpus.effective", "0-2,4-7")],
                &[],
                "cores.lanes",
                "fail",
                &["core 3 is outside of the control group's cpuset", "AllowedCPUs="],
            ),
            (
                &[(status, allowed), (&format!("{cpu}/online"), "0-2,4-7")],
                &[],
                "cores.lanes",
                "fail",
                &["core 3 is not there"],
            ),
            (
                &[("GROUP/cpu.max", "250000 100000")],
                &[],
                "cores.quota",
                "warning",
                &["2.50 cores", "cpu.max", "2 cores"],
            ),
            (&[("GROUP/cpu.max", "800000 100000")], &[], "cores.quota", "note", &["8.00 cores"]),
            (
                &[("sys/fs/cgroup/system.slice/cpu.max", "100000 100000")],
                &[],
                "cores.quota",
                "warning",
                &["system.slice/cpu.max"],
            ),
            (&[("GROUP/cpu.stat", "nr_throttled 17")], &[], "cores.throttled", "warning", &["17 periods"]),
            (
                &[
                    (&format!("{cpu}/cpu0/topology/thread_siblings_list"), "0,2"),
                    (&format!("{cpu}/cpu2/topology/thread_siblings_list"), "0,2"),
                ],
                &[],
                "cores.siblings",
                "warning",
                &["0,2", "--cores 0-1,3"],
            ),
            (
                &[
                    (&format!("{cpu}/cpu0/topology/thread_siblings_list"), "0,4"),
                    (&format!("{cpu}/cpu4/topology/thread_siblings_list"), "0,4"),
                ],
                &[],
                "cores.siblings",
                "note",
                &["control thread"],
            ),
            (
                &[(&format!("{cpu}/cpu3/cpufreq/scaling_governor"), "powersave")],
                &[],
                "cores.governor",
                "warning",
                &["cores 3", "cpupower -c 3"],
            ),
        ],
    );
    let tree = Tree::new("groups-v1");
    tree.put("proc/self/cgroup", "4:cpuset:/jobs\n3:cpu,cpuacct:/jobs/a\n0::/\n");
    tree.put("sys/fs/cgroup/cpu/jobs/cpu.cfs_quota_us", "150000");
    tree.put("sys/fs/cgroup/cpu/jobs/cpu.cfs_period_us", "100000");
    tree.put("sys/fs/cgroup/cpu/jobs/a/cpu.cfs_quota_us", "-1");
    tree.put("sys/fs/cgroup/cpu/jobs/a/cpu.cfs_period_us", "100000");
    assert!(diagnose(&tree, &[]).says("cores.quota", "warning").contains("1.50 cores"));
}

#[test]
fn lanes_and_control_thread_that_are_in_each_other_s_way_are_told() {
    let tree = Tree::new("placement");
    let place = |cores: &str, control: &str| {
        let mut command = doctor(&["--root", tree.0.to_str().unwrap(), "--worker-urls", "http://10.0.0.1:30000"]);
        command.args(["--cores", cores, "--control-core", control]);
        Diagnosis::of(command)
    };
    let line = place("0-3", "3").says("cores.control", "warning");
    assert!(line.contains("shares core 3"), "{line}");
    let line = place("0-3", "9").says("cores.control", "fail");
    assert!(line.contains("core 9 is not there"), "{line}");
    let all = place("0-7", "auto");
    assert!(all.says("cores.control", "note").contains("--cores 0-6 --control-core 7"));
    let line = all.says("cores.nodes", "warning");
    assert!(line.contains("nodes 0, 1") && line.contains("--cores 0-3"), "{line}");
    let line = all.says("interrupts.node", "warning");
    assert!(line.contains("cores 4-7 are not") && line.contains("some of 0-3"), "{line}");
    let far = place("4-7", "0");
    assert!(far.says("interrupts.node", "warning").contains("eth0 is on NUMA node 0"));
    assert!(far.says("cores.nodes", "ok").contains("node 1"));
}

#[test]
fn cards_that_work_against_the_lanes_are_told() {
    let irq = |n: usize| format!("proc/irq/{n}/smp_affinity_list");
    let queue = "sys/class/net/eth0/queues";
    told(
        "cards",
        &[
            (
                &[(&irq(62), "0"), (&irq(63), "0"), (&irq(64), "0")],
                &[],
                "interrupts.affinity",
                "warning",
                &["4 interrupts of eth0 go to cores 0", "one core does it all", "nic.sh show eth0 0-3"],
            ),
            (&[(&irq(64), "5")], &[], "interrupts.affinity", "warning", &["not on its NUMA node 0"]),
            (&[(&irq(64), "2")], &[], "interrupts.affinity", "note", &["lanes on 0-2 have less time"]),
            (&[("proc/irq/64/effective_affinity_list", "2")], &[], "interrupts.affinity", "note", &["cores 0-2"]),
            (&[(&format!("{queue}/rx-1/rps_cpus"), "00000000,0000000f")], &[], "interrupts.rps", "note", &["RPS"]),
            (
                &[("proc/800/comm", "irqbalance")],
                &[],
                "interrupts.irqbalance",
                "warning",
                &["IRQBALANCE_BANNED_CPULIST=0-3"],
            ),
        ],
    );
    let tree = Tree::new("card-few");
    std::fs::remove_dir_all(tree.0.join(queue)).unwrap();
    tree.put(&format!("{queue}/rx-0/rps_cpus"), "0");
    tree.put(&format!("{queue}/rx-1/rps_cpus"), "0");
    tree.put(&format!("{queue}/tx-0/xps_cpus"), "0");
    tree.put(&format!("{queue}/tx-1/xps_cpus"), "0");
    let diagnosis = diagnose(&tree, &[]);
    assert!(diagnosis.says("interrupts.queues", "note").contains("ethtool -L eth0 combined 4"));
    assert!(diagnosis.says("interrupts.rps", "note").contains("RPS is off"));
    assert!(diagnosis.says("interrupts.xps", "note").contains("2 send queues"));
    // A card that is down is nobody's concern.
    tree.put("sys/class/net/eth0/operstate", "down");
    assert_eq!(diagnose(&tree, &[]).bad(), []);
}

#[test]
fn settings_of_tcp_and_clocks_are_told() {
    let net = "proc/sys/net/ipv4";
    let clock = "sys/devices/system/clocksource/clocksource0";
    told(
        "settings",
        &[
            (
                &[("proc/sys/net/core/somaxconn", "128")],
                &[],
                "network.somaxconn",
                "warning",
                &["sysctl -w net.core.somaxconn=4096"],
            ),
            (
                &[(&format!("{net}/tcp_max_syn_backlog"), "512")],
                &["--backlog", "600"],
                "network.syn_backlog",
                "note",
                &["backlog=600"],
            ),
            (&[(&format!("{net}/tcp_tw_reuse"), "0")], &[], "network.tw_reuse", "note", &["tcp_tw_reuse=1"]),
            (
                &[(&format!("{net}/ip_local_port_range"), "50000 59999")],
                &[],
                "network.local_ports",
                "warning",
                &["10000 local ports"],
            ),
            (
                &[],
                &["--max-requests-per-worker", "30000"],
                "network.local_ports",
                "warning",
                &["28232 local ports", "30000 requests"],
            ),
            (
                &[(&format!("{net}/ip_local_reserved_ports"), "40000-49999")],
                &["--max-requests-per-worker", "20000"],
                "network.local_ports",
                "warning",
                &["18232 local ports"],
            ),
            (
                &[],
                &["--port", "40000"],
                "network.own_ports",
                "warning",
                &["port 40000", "ip_local_reserved_ports=40000"],
            ),
            (
                &[(&format!("{clock}/current_clocksource"), "hpet")],
                &[],
                "clock.source",
                "warning",
                &["hpet", "echo tsc"],
            ),
            (&[("proc/700/comm", "bash")], &[], "clock.sync", "note", &["chrony"]),
            (
                &[("sys/kernel/mm/transparent_hugepage/enabled", "[always] madvise never")],
                &[],
                "memory.huge_pages",
                "note",
                &["echo madvise"],
            ),
            (
                &[],
                &["--prometheus-host", "0.0.0.0", "--admin-open"],
                "listeners.admin_exposure",
                "warning",
                &["--prometheus-host 127.0.0.1"],
            ),
            (&[], &["--host", "0.0.0.0"], "listeners.keys", "note", &["no key"]),
        ],
    );
    let tree = Tree::new("reserved");
    tree.put(&format!("{net}/ip_local_reserved_ports"), "40000");
    assert_eq!(diagnose(&tree, &["--port", "40000"]).bad(), []);
    assert_eq!(diagnose(&tree, &["--host", "::", "--api-key", "k"]).bad(), []);
}

#[test]
fn a_directory_without_a_host_is_refused() {
    let mut command = doctor(&["--worker-urls", "http://w", "--root", env!("CARGO_TARGET_TMPDIR")]);
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("holds no proc/self/limits"));
}

// ── this host ───────────────────────────────────────────────────────────────────────────────────────────────────

/// `doctor` on this host, on one of its cores and, unless others are named, on free ports.
fn here(url: &str, more: &[&str]) -> Command {
    let core = mask()[0].to_string();
    let mut command = doctor(&["--worker-urls", url, "--cores", &core]);
    for port in ["--port", "--prometheus-port"] {
        if !more.contains(&port) {
            command.args([port, "0"]);
        }
    }
    command.args(more);
    command
}

#[test]
fn this_host_and_a_good_worker_are_fit_to_serve() {
    let (_worker, url) = worker(0, &["--model", "m"]);
    let diagnosis = Diagnosis::of(here(&url, &["--default-model", "m"]));
    assert_eq!(diagnosis.exit, 0, "{:#}", diagnosis.said);
    diagnosis.says("kernel.ring", "ok");
    diagnosis.says("listeners.clients", "ok");
    assert!(diagnosis.says("workers.health", "ok").contains("answers 200"));
    assert!(diagnosis.says("workers.models", "ok").contains("serves m"));
    assert!(diagnosis.says("workers.default_model", "ok").contains("1 of 1"));
    assert!(!diagnosis.findings().iter().any(|f| f["check"] == "workers.keep_alive"));

    // The same as text, for people.
    let core = mask()[0].to_string();
    let output = command(&["doctor", "--worker-urls", &url, "--cores", &core, "--port", "0", "--prometheus-port", "0"])
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("\nok       workers.connect") && text.contains("0 fail, "), "{text}");
}

#[test]
fn workers_that_are_dead_or_ill_or_of_another_model_are_told() {
    let gone = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", gone.local_addr().unwrap());
    drop(gone);
    let diagnosis = Diagnosis::of(here(&url, &[]));
    assert_eq!(diagnosis.exit, 2);
    let line = diagnosis.says("workers.connect", "fail");
    assert!(line.contains("refused") && line.contains(&format!("curl -v {url}/health")), "{line}");

    let (_ill, url) = worker(0, &["--ready-after-ms", "600000"]);
    let diagnosis = Diagnosis::of(here(&url, &[]));
    assert_eq!(diagnosis.exit, 2);
    assert!(diagnosis.says("workers.health", "fail").contains("answers 503"));

    let diagnosis = Diagnosis::of(here("http://no-such-host.invalid:1", &[]));
    assert_eq!(diagnosis.exit, 2);
    diagnosis.says("workers.address", "fail");

    let (_keyed, url) = worker(0, &["--api-key", "k", "--model", "m"]);
    let line = Diagnosis::of(here(&url, &[])).says("workers.models", "fail");
    assert!(line.contains("401") && line.contains("give it an api_key"), "{line}");
    let config = format!("[[workers]]\nurl = '{url}'\napi_key = 'k'\nmodels = ['n']\n");
    let file = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("doctor-keyed-{}.toml", std::process::id()));
    std::fs::write(&file, config).unwrap();
    let mut command = doctor(&["--port", "0", "--prometheus-port", "0", "--config", file.to_str().unwrap()]);
    command.args(["--default-model", "x"]);
    let diagnosis = Diagnosis::of(command);
    let _ = std::fs::remove_file(file);
    assert!(diagnosis.says("workers.models", "warning").contains("serves m, and not n"));
    assert!(diagnosis.says("workers.default_model", "fail").contains("no worker serves"));
}

#[test]
fn a_keep_alive_shorter_than_the_pool_s_is_seen_by_watching() {
    let (_worker, url) = worker(0, &["--keep-alive-secs", "1.5"]);
    let diagnosis = Diagnosis::of(here(&url, &["--slow"]));
    let line = diagnosis.says("workers.keep_alive", "warning");
    assert!(line.contains("closes idle connections after 1") && line.contains("--pool-idle-ms"), "{line}");
    let diagnosis = Diagnosis::of(here(&url, &["--slow", "--pool-idle-ms", "500"]));
    diagnosis.says("workers.keep_alive", "ok");
}

#[test]
fn cores_and_descriptors_of_this_host_are_held_against_the_configuration() {
    let (_worker, url) = worker(0, &[]);
    let diagnosis =
        Diagnosis::of(doctor(&["--worker-urls", &url, "--port", "0", "--prometheus-port", "0", "--cores", "999"]));
    assert_eq!(diagnosis.exit, 2);
    assert!(diagnosis.says("cores.lanes", "fail").contains("core 999 is not there"));

    let mut limited = Command::new("prlimit");
    limited.args(["--nofile=256:256", children::BINARY, "doctor", "--json", "--strict", "--worker-urls", &url]);
    let core = mask()[0].to_string();
    limited.args(["--cores", &core, "--port", "0", "--prometheus-port", "0"]);
    let diagnosis = Diagnosis::of(limited);
    assert_eq!(diagnosis.exit, 1, "{:#}", diagnosis.said);
    let line = diagnosis.says("limits.files", "warning");
    assert!(line.starts_with("256 open files") && line.contains("LimitNOFILE="), "{line}");
}

#[test]
fn ports_that_are_taken_are_told_by_whom() {
    let (_worker, url) = worker(0, &[]);
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = other.local_addr().unwrap().port().to_string();
    let answering = std::thread::spawn(move || {
        let (mut stream, _) = other.accept().unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").unwrap();
        other
    });
    let diagnosis = Diagnosis::of(here(&url, &["--port", &port]));
    drop(answering.join().unwrap());
    assert_eq!(diagnosis.exit, 2);
    let line = diagnosis.says("listeners.clients", "fail");
    assert!(line.contains(&format!("127.0.0.1:{port} is taken")) && line.contains("sudo ss -tlnp"), "{line}");

    let (mut running, address): (Process, _) = gateway(&[&url], &[]);
    let admin = running.announced("admin").port().to_string();
    let port = address.port().to_string();
    let diagnosis = Diagnosis::of(here(&url, &["--port", &port, "--prometheus-port", &admin]));
    assert_eq!(diagnosis.exit, 0, "{:#}", diagnosis.said);
    assert!(diagnosis.says("listeners.clients", "note").contains("a corelane has"));
    diagnosis.says("listeners.admin", "note");
}

#[test]
fn mistakes_of_the_configuration_come_first() {
    let output = command(&["doctor", "--port", "x"]).output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(told.contains("--port: \"x\" is not a whole number"), "{told}");
    let help = command(&["doctor", "--help"]).output().unwrap();
    let text = String::from_utf8_lossy(&help.stdout).into_owned();
    for words in ["--slow", "--root <DIR>", "Exit code: 0 nothing fails"] {
        assert!(text.contains(words), "{words}");
    }
}
