//! The tuning kit: its settings satisfy `doctor`, its examples are accepted, its unit holds, its script undoes itself.
//!
//! Takes the files under `tuning/`, gives verdicts. Never touches a card or a setting of this host: the script runs on
//! prepared trees.

mod children;
mod host;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use children::command;
use corelane::config::Config;
use corelane::limits::{LANE_LOCKED_BYTES, MAX_LANES};
use host::Tree;

fn tuning() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tuning")
}

fn read(name: &str) -> String {
    std::fs::read_to_string(tuning().join(name)).unwrap()
}

fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// Lines that are neither empty nor a comment.
fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#'))
}

/// Every file of a tree but fake programs' logs, with its text.
fn snapshot(tree: &Tree) -> BTreeMap<PathBuf, String> {
    fn walk(dir: &Path, out: &mut BTreeMap<PathBuf, String>) {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => walk(&path, out),
                false => drop(out.insert(path.clone(), std::fs::read_to_string(&path).unwrap().trim().to_owned())),
            }
        }
    }
    let mut out = BTreeMap::new();
    ["proc", "sys"].iter().for_each(|top| walk(&tree.0.join(top), &mut out));
    out
}

#[test]
fn the_settings_leave_doctor_nothing_to_say() {
    let tree = Tree::new("sysctl");
    for key in ["core/somaxconn", "ipv4/tcp_max_syn_backlog", "ipv4/tcp_tw_reuse"] {
        tree.put(&format!("proc/sys/net/{key}"), "0");
    }
    tree.put("proc/sys/net/ipv4/ip_local_port_range", "60000 60999");
    tree.put("proc/sys/fs/pipe-user-pages-soft", "1");
    tree.put("proc/sys/kernel/io_uring_disabled", "2");
    let args = ["doctor", "--root", tree.0.to_str().unwrap(), "--cores", "0-3", "--control-core", "4", "--strict"];
    let doctor = || command(&args).args(["--worker-urls", "http://10.0.0.1:30000"]).output().unwrap();
    assert_eq!(doctor().status.code(), Some(2));
    for line in lines(&read("sysctl.conf")) {
        let (key, value) = line.split_once('=').expect(line);
        let key = key.trim();
        let path = format!("proc/sys/{}", key.trim_start_matches('-').replace('.', "/"));
        // A typo would be a setting that no kernel knows.
        assert!(key.starts_with('-') || Path::new("/").join(&path).exists(), "{path}");
        tree.put(&path, value.trim());
    }
    let output = doctor();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output));
    assert!(text(&output).contains("\n0 fail, 0 warning, 0 note, "), "{}", text(&output));
}

#[test]
fn the_limits_are_enough_for_the_most_lanes() {
    for kind in ["soft", "hard"] {
        let of = |item: &str| -> u64 {
            let conf = read("limits.conf");
            let row = lines(&conf).find(|l| l.split_whitespace().take(3).eq(["corelane", kind, item]));
            row.unwrap_or_else(|| panic!("{kind} {item}")).split_whitespace().last().unwrap().parse().unwrap()
        };
        assert_eq!(of("nofile"), 1 << 20);
        assert!(of("memlock") * 1024 >= LANE_LOCKED_BYTES * MAX_LANES as u64);
    }
}

#[test]
fn every_example_is_accepted() {
    let mut names: Vec<PathBuf> =
        std::fs::read_dir(tuning().join("examples")).unwrap().map(|e| e.unwrap().path()).collect();
    names.sort();
    assert!(names.len() >= 3);
    for name in names {
        let output = command(&["check", "--config", name.to_str().unwrap()]).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{}", text(&output));
        // Cores of a larger host than this are all that may be missing.
        for line in text(&output).lines().filter(|l| l.starts_with("warning: ")) {
            assert!(line.contains("core"), "{line}");
        }
        // And they fit the host that the example speaks of.
        if name.ends_with("two-sockets.toml") {
            let tree = Tree::new("two-sockets");
            tree.put("proc/self/status", "CapEff:\t0\nCpus_allowed_list:\t0-63\n");
            for (file, list) in
                [("cpu/online", "0-63"), ("node/node0/cpulist", "0-31"), ("node/node1/cpulist", "32-63")]
            {
                tree.put(&format!("sys/devices/system/{file}"), list);
            }
            let args = ["doctor", "--root", tree.0.to_str().unwrap(), "--config", name.to_str().unwrap()];
            let output = command(&args).output().unwrap();
            let said = text(&output);
            assert!(said.contains("all lanes are on NUMA node 0") && said.contains("\n0 fail, "), "{said}");
            let output = command(&args).args(["--cores", "2-31,34-63"]).output().unwrap();
            assert!(text(&output).contains("warning  cores.nodes"), "{}", text(&output));
        }
    }
}

// ── the unit ────────────────────────────────────────────────────────────────────────────────────────────────────

fn settings(unit: &str) -> Vec<(&str, &str)> {
    lines(unit).filter_map(|l| l.split_once('=')).collect()
}

#[test]
fn the_unit_gives_what_the_gateway_needs() {
    let unit = read("corelane.service");
    let all = settings(&unit);
    let of = |name: &str| all.iter().find(|(n, _)| *n == name).unwrap_or_else(|| panic!("{name}")).1;
    assert_eq!(of("Type"), "notify");
    assert!(of("WatchdogSec").parse::<u64>().unwrap() >= 4);
    let config = Config::with_workers(Vec::new());
    let drain = (config.shutdown_settle + config.shutdown_grace).as_secs();
    assert!(of("TimeoutStopSec").parse::<u64>().unwrap() > drain);
    let locked = of("LimitMEMLOCK").strip_suffix('M').unwrap().parse::<u64>().unwrap() << 20;
    assert!(locked >= LANE_LOCKED_BYTES * MAX_LANES as u64 && of("LimitNOFILE") == "1048576");
    // Files, cores and the manager's socket stay within reach, and nothing throttles.
    assert!(of("RestrictAddressFamilies").split(' ').eq(["AF_INET", "AF_INET6", "AF_UNIX"]));
    for never in ["CPUQuota", "CPUAffinity", "ProcSubset", "PrivateNetwork", "PrivateUsers"] {
        assert!(!all.iter().any(|(name, _)| *name == never), "{never}");
    }
    // What it starts is understood.
    let serve: Vec<&str> = of("ExecStart").split(' ').skip(1).collect();
    assert_eq!(serve, ["serve", "--config", "/etc/corelane/gateway.toml"]);
}

/// The system calls of a set of systemd's, as this host's systemd has it; `None`: there is none.
fn system_calls(set: &str) -> Option<Vec<String>> {
    let output = Command::new("systemd-analyze").args(["syscall-filter", "--no-pager"]).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let mut sets: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut name = "";
    for line in text.lines().filter(|l| !l.trim().starts_with('#')) {
        match line.starts_with('@') {
            true => name = line.trim(),
            false if line.trim().is_empty() => {}
            false => sets.entry(name).or_default().push(line.trim()),
        }
    }
    let mut found = Vec::new();
    let mut open = vec![set];
    while let Some(set) = open.pop() {
        for item in sets.get(set)? {
            if item.starts_with('@') { open.push(item) } else { found.push((*item).to_owned()) }
        }
    }
    Some(found)
}

#[test]
fn the_unit_s_filter_lets_the_gateway_s_system_calls_pass() {
    let unit = read("corelane.service");
    let filters: Vec<&str> =
        settings(&unit).into_iter().filter(|(name, _)| *name == "SystemCallFilter").map(|(_, value)| value).collect();
    let mut allowed = Vec::new();
    for filter in &filters {
        let (takes, sets) = filter.strip_prefix('~').map_or((false, *filter), |sets| (true, sets));
        for set in sets.split(' ') {
            let Some(calls) = system_calls(set) else {
                return eprintln!("this host has no systemd that knows {set}");
            };
            match takes {
                true => allowed.retain(|call| !calls.contains(call)),
                false => allowed.extend(calls),
            }
        }
    }
    for call in [
        "io_uring_setup",
        "io_uring_enter",
        "io_uring_register",
        "sched_setaffinity",
        "sched_getaffinity",
        "prlimit64",
        "splice",
        "pipe2",
        "eventfd2",
        "membarrier",
        "getrandom",
        "mlock",
        "clone3",
        "accept4",
    ] {
        assert!(allowed.iter().any(|a| a == call), "{call} is filtered");
    }
    for call in ["ptrace", "mount", "setuid", "bpf", "kexec_load"] {
        assert!(!allowed.iter().any(|a| a == call), "{call} is allowed");
    }
}

#[test]
fn systemd_understands_the_unit_and_finds_it_closed() {
    if Command::new("systemd-analyze").arg("--version").output().is_err() {
        return eprintln!("this host has no systemd");
    }
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("unit-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let path = dir.join("corelane.service");
    std::fs::write(&path, read("corelane.service").replace("/usr/local/bin/corelane", children::BINARY)).unwrap();
    let verified = Command::new("systemd-analyze").arg("verify").arg(&path).output().unwrap();
    let secure = Command::new("systemd-analyze")
        .args(["security", "--no-pager", "--offline=true", "--threshold=20"])
        .arg(&path)
        .output()
        .unwrap();
    let _ = std::fs::remove_dir_all(dir);
    let about_it = text(&verified).lines().filter(|l| l.contains("corelane.service")).collect::<Vec<_>>().join("\n");
    assert!(verified.status.success() && about_it.is_empty(), "{}", text(&verified));
    // Older ones cannot judge a file.
    if !text(&secure).contains("unrecognized option") {
        assert!(secure.status.success(), "{}", text(&secure));
    }
}

// ── the card's script ───────────────────────────────────────────────────────────────────────────────────────────

/// Runs `nic.sh` on a tree, with a fake ethtool of the tree's, if it has one.
fn nic(tree: &Tree, args: &[&str]) -> Output {
    let root = tree.0.to_str().unwrap();
    let mut command = Command::new("sh");
    command.arg(tuning().join("nic.sh")).args(args);
    command.env("NIC_ROOT", root).env("NIC_STATE", format!("{root}/state")).env("ETHTOOL", format!("{root}/ethtool"));
    command.output().unwrap()
}

#[track_caller]
fn nic_well(tree: &Tree, args: &[&str]) -> String {
    let output = nic(tree, args);
    assert!(output.status.success(), "{}", text(&output));
    text(&output).replace(tree.0.to_str().unwrap(), "")
}

/// A card whose interrupts all go anywhere, and that has neither RPS nor XPS.
fn untuned(name: &str) -> Tree {
    let tree = Tree::new(name);
    for irq in 61..65 {
        tree.put(&format!("proc/irq/{irq}/smp_affinity_list"), "0-7");
    }
    for queue in 0..4 {
        tree.put(&format!("sys/class/net/eth0/queues/rx-{queue}/rps_cpus"), "ff");
        tree.put(&format!("sys/class/net/eth0/queues/tx-{queue}/xps_cpus"), "00");
    }
    tree
}

#[test]
fn what_is_shown_is_what_is_applied_and_undone() {
    let tree = untuned("nic");
    let before = snapshot(&tree);
    let shown = nic_well(&tree, &["show", "eth0", "4-7"]);
    assert_eq!(snapshot(&tree), before, "show changed something");
    let changes = |said: &str| said.lines().filter(|l| l.contains(" -> ")).map(str::to_owned).collect::<Vec<_>>();
    let mut wanted: Vec<String> =
        (61..65).map(|irq| format!("/proc/irq/{irq}/smp_affinity_list: 0-7 -> {}", irq - 57)).collect();
    wanted.extend((0..4).map(|q| format!("/sys/class/net/eth0/queues/rx-{q}/rps_cpus: ff -> 0")));
    let masks = ["10", "20", "40", "80"];
    wanted.extend((0..4).map(|q| format!("/sys/class/net/eth0/queues/tx-{q}/xps_cpus: 00 -> 000000{}", masks[q])));
    assert_eq!(changes(&shown), wanted);
    assert!(shown.contains("ethtool is not there"), "{shown}");

    assert_eq!(changes(&nic_well(&tree, &["apply", "eth0", "4-7"])), wanted);
    assert_eq!(std::fs::read_to_string(tree.0.join("proc/irq/63/smp_affinity_list")).unwrap().trim(), "6");
    assert_eq!(std::fs::read_to_string(tree.0.join("proc/irq/60/smp_affinity_list")).unwrap().trim(), "0-7");
    assert_eq!(changes(&nic_well(&tree, &["show", "eth0", "4-7"])), [] as [&str; 0], "nothing is left to do");

    // The values from before are not lost to a second application.
    let again = nic(&tree, &["apply", "eth0", "0-3"]);
    assert_eq!(again.status.code(), Some(2));
    assert!(text(&again).contains("undo eth0 first"), "{}", text(&again));
    nic_well(&tree, &["undo", "eth0"]);
    assert_eq!(snapshot(&tree), before);
    assert_eq!(nic(&tree, &["undo", "eth0"]).status.code(), Some(2), "nothing is kept twice");
}

#[test]
fn what_was_applied_satisfies_doctor() {
    let tree = untuned("nic-doctor");
    let doctor = || {
        let args = ["doctor", "--root", tree.0.to_str().unwrap(), "--cores", "0-3", "--control-core", "4"];
        text(&command(&args).args(["--worker-urls", "http://10.0.0.1:30000"]).output().unwrap())
    };
    assert!(doctor().contains("warning  interrupts.affinity"), "{}", doctor());
    nic_well(&tree, &["apply", "eth0", "0-3"]);
    assert!(doctor().contains("\n0 fail, 0 warning, 0 note, "), "{}", doctor());
}

#[test]
fn few_queues_are_shared_and_many_cores_have_long_masks() {
    let tree = untuned("nic-few");
    for core in 8..40 {
        tree.put(&format!("sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"), &core.to_string());
    }
    std::fs::remove_dir_all(tree.0.join("sys/class/net/eth0/queues")).unwrap();
    for queue in 0..2 {
        tree.put(&format!("sys/class/net/eth0/queues/rx-{queue}/rps_cpus"), "0");
        tree.put(&format!("sys/class/net/eth0/queues/tx-{queue}/xps_cpus"), "0");
    }
    // As a virtual card has them: receive and send interrupts of a queue, its bus device a level up.
    tree.put(
        "proc/interrupts",
        " CPU0\n 61: 1 PCI-MSIX 0-edge virtio1-config\n 62: 1 PCI-MSIX 1-edge virtio1-input.0\n \
         63: 1 PCI-MSIX 2-edge virtio1-output.0\n 64: 1 PCI-MSIX 3-edge virtio1-input.1",
    );
    let said = nic_well(&tree, &["apply", "eth0", "1-3,33", "--irq-cores", "5,34,35"]);
    for line in [
        "/proc/irq/62/smp_affinity_list: 0-7 -> 5",
        "/proc/irq/63/smp_affinity_list: 0-7 -> 5",
        "/proc/irq/64/smp_affinity_list: 0-7 -> 34",
        "queues/rx-0/rps_cpus: 0 -> 00000002,0000000e",
        "queues/tx-0/xps_cpus: 0 -> 0000000a",
        "queues/tx-1/xps_cpus: 0 -> 00000002,00000004",
    ] {
        assert!(said.contains(line), "{line}\n{said}");
    }
    assert!(!said.contains("/irq/61/"), "{said}");
}

#[test]
fn ethtool_is_asked_first_and_told_the_old_values_in_the_end() {
    use std::os::unix::fs::PermissionsExt;
    let tree = untuned("nic-ethtool");
    // A card that keeps what it is told in files.
    tree.put("card/combined", "2");
    tree.put("card/rx", "512");
    tree.put("card/tx", "512");
    tree.put("card/adaptive-rx", "on");
    tree.put("card/rx-usecs", "50");
    tree.put(
        "ethtool",
        r#"#!/bin/sh
cd "$NIC_ROOT/card" || exit 1
case $1 in
-l) printf 'Channel parameters for eth0:\nPre-set maximums:\nRX:\t\tn/a\nCombined:\t8\nCurrent hardware settings:\nRX:\t\tn/a\nCombined:\t%s\n' "$(cat combined)" ;;
-g) printf 'Ring parameters for eth0:\nPre-set maximums:\nRX:\t\t4096\nRX Mini:\tn/a\nTX:\t\t1024\nCurrent hardware settings:\nRX:\t\t%s\nRX Mini:\tn/a\nTX:\t\t%s\n' "$(cat rx)" "$(cat tx)" ;;
-c) printf 'Coalesce parameters for eth0:\nAdaptive RX: %s  TX: off\nrx-usecs: %s\nrx-usecs-irq: 0\n' "$(cat adaptive-rx)" "$(cat rx-usecs)" ;;
-L | -G | -C) echo "$4" >"$3" ;;
esac"#,
    );
    std::fs::set_permissions(tree.0.join("ethtool"), std::fs::Permissions::from_mode(0o755)).unwrap();
    let card = || {
        ["combined", "rx", "tx", "adaptive-rx", "rx-usecs"]
            .map(|name| std::fs::read_to_string(tree.0.join("card").join(name)).unwrap().trim().to_owned())
    };
    let before = card();

    // Only what was asked for, and no more than the card has.
    let shown = nic_well(&tree, &["show", "eth0", "0-3"]);
    assert!(shown.contains("-L eth0 combined: 2 -> 4") && !shown.contains("-G") && !shown.contains("-C"), "{shown}");
    let args = ["eth0", "0-3", "--queues", "16", "--ring", "2048", "--usecs", "8"];
    let shown = nic_well(&tree, &[&["show"], &args[..]].concat());
    for line in
        ["combined: 2 -> 8", "rx: 512 -> 2048", "tx: 512 -> 1024", "adaptive-rx: on -> off", "rx-usecs: 50 -> 8"]
    {
        assert!(shown.contains(line), "{line}\n{shown}");
    }
    assert_eq!(card(), before);
    nic_well(&tree, &[&["apply"], &args[..]].concat());
    assert_eq!(card(), ["8", "2048", "1024", "off", "8"]);
    nic_well(&tree, &["undo", "eth0"]);
    assert_eq!(card(), before);
}

#[test]
fn interrupts_that_the_driver_keeps_are_told_and_left() {
    let tree = untuned("nic-kept");
    // Writing to a directory fails, for root too.
    let kept = tree.0.join("proc/irq/62/smp_affinity_list");
    std::fs::remove_file(&kept).unwrap();
    std::fs::create_dir(&kept).unwrap();
    let before = snapshot(&tree);
    let said = nic_well(&tree, &["apply", "eth0", "0-3"]);
    assert!(said.contains("/proc/irq/62/smp_affinity_list cannot be set") && said.contains("/irq/63/"), "{said}");
    nic_well(&tree, &["undo", "eth0"]);
    assert_eq!(snapshot(&tree), before);
}

#[test]
fn nonsense_is_refused_before_anything_is_touched() {
    let tree = untuned("nic-nonsense");
    let before = snapshot(&tree);
    for (args, says) in [
        (&[][..], "see the head"),
        (&["apply", "eth9", "0"], "eth9: no such card"),
        (&["apply", "lo", "0"], "lo: no such card"),
        (&["apply", "eth0"], "which cores"),
        (&["apply", "eth0", "3-1"], "looks like"),
        (&["apply", "eth0", "a"], "looks like"),
        (&["apply", "eth0", "0-99"], "core 8 is not there"),
        (&["apply", "eth0", "0", "--ring", "x"], "take numbers"),
        (&["apply", "eth0", "0", "--rings", "1"], "--rings: no such option"),
        (&["reset", "eth0", "0"], "show, apply or undo"),
        (&["undo", "eth0"], "nothing was applied"),
    ] {
        let output = nic(&tree, args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {}", text(&output));
        assert!(text(&output).contains(says), "{args:?}: {}", text(&output));
    }
    assert_eq!(snapshot(&tree), before);
}

#[test]
fn shellcheck_has_nothing_to_say() {
    let mut shellcheck = Command::new("shellcheck");
    match shellcheck.args(["-s", "sh"]).arg(tuning().join("nic.sh")).output() {
        Ok(output) => assert!(output.status.success(), "{}", text(&output)),
        Err(_) => eprintln!("this host has no shellcheck"),
    }
}
