//! A host as a prepared tree of `/proc` and `/sys`.
//!
//! Takes files that differ, gives a directory. Never leaves one behind.

use std::path::PathBuf;

/// A copy of a host's `/proc` and `/sys`, removed when the test ends.
pub struct Tree(pub PathBuf);

/// Two sockets with four cores each, a card with four queues on the first: nothing to complain of.
const GOOD: &[(&str, &str)] = &[
    ("proc/sys/kernel/osrelease", "6.8.0-41-generic"),
    ("proc/sys/kernel/io_uring_disabled", "0"),
    (
        "proc/self/limits",
        "Limit                     Soft Limit           Hard Limit           Units     \n\
         Max open files            1024                 1048576              files     \n\
         Max locked memory         67108864             67108864             bytes     \n",
    ),
    ("proc/self/status", "Name:\tcat\nCapEff:\t0000000000000000\nCpus_allowed:\tff\nCpus_allowed_list:\t0-7\n"),
    ("proc/self/cgroup", "0::/system.slice/corelane.service\n"),
    ("sys/fs/cgroup/system.slice/corelane.service/cpu.max", "max 100000"),
    ("sys/fs/cgroup/system.slice/corelane.service/cpu.stat", "usage_usec 1\nnr_periods 0\nnr_throttled 0\n"),
    ("sys/fs/cgroup/system.slice/corelane.service/cpuset.cpus.effective", "0-7"),
    ("proc/sys/fs/pipe-max-size", "1048576"),
    ("proc/sys/fs/pipe-user-pages-soft", "262144"),
    ("proc/sys/net/core/somaxconn", "65535"),
    ("proc/sys/net/ipv4/tcp_max_syn_backlog", "65535"),
    ("proc/sys/net/ipv4/ip_local_port_range", "32768\t60999"),
    ("proc/sys/net/ipv4/ip_local_reserved_ports", ""),
    ("proc/sys/net/ipv4/tcp_tw_reuse", "1"),
    ("sys/devices/system/clocksource/clocksource0/current_clocksource", "tsc"),
    ("sys/devices/system/clocksource/clocksource0/available_clocksource", "tsc hpet acpi_pm"),
    ("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never"),
    ("proc/700/comm", "chronyd"),
    ("sys/devices/system/cpu/online", "0-7"),
    ("sys/devices/system/node/node0/cpulist", "0-3"),
    ("sys/devices/system/node/node1/cpulist", "4-7"),
    (
        "proc/interrupts",
        "           CPU0       CPU1       CPU2       CPU3       CPU4       CPU5       CPU6       CPU7\n\
         \x2060:  1  0  0  0  0  0  0  0  IR-PCI-MSIX-0000:3b:00.0    0-edge      mlx5_async0@pci:0000:3b:00.0\n\
         \x2061:  9  0  0  0  0  0  0  0  IR-PCI-MSIX-0000:3b:00.0    1-edge      mlx5_comp0@pci:0000:3b:00.0\n\
         \x2062:  0  9  0  0  0  0  0  0  IR-PCI-MSIX-0000:3b:00.0    2-edge      mlx5_comp1@pci:0000:3b:00.0\n\
         \x2063:  0  0  9  0  0  0  0  0  IR-PCI-MSIX-0000:3b:00.0    3-edge      mlx5_comp2@pci:0000:3b:00.0\n\
         \x2064:  0  0  0  9  0  0  0  0  IR-PCI-MSIX-0000:3b:00.0    4-edge      mlx5_comp3@pci:0000:3b:00.0\n\
         LOC:  5  5  5  5  5  5  5  5   Local timer interrupts\n",
    ),
    ("proc/irq/60/smp_affinity_list", "0-7"),
    ("proc/irq/61/smp_affinity_list", "0"),
    ("proc/irq/62/smp_affinity_list", "1"),
    ("proc/irq/63/smp_affinity_list", "2"),
    ("proc/irq/64/smp_affinity_list", "3"),
    ("sys/class/net/lo/operstate", "unknown"),
    ("sys/class/net/eth0/operstate", "up"),
    ("sys/class/net/eth0/device/numa_node", "0"),
];

impl Tree {
    pub fn new(name: &str) -> Tree {
        let root = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("host-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&root);
        let tree = Tree(root);
        for (path, text) in GOOD {
            tree.put(path, text);
        }
        for core in 0..8 {
            tree.put(&format!("sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list"), &core.to_string());
            tree.put(&format!("sys/devices/system/cpu/cpu{core}/cpufreq/scaling_governor"), "performance");
        }
        for irq in 60..65 {
            tree.put(&format!("sys/class/net/eth0/device/msi_irqs/{irq}"), "msix");
        }
        for queue in 0..4 {
            tree.put(&format!("sys/class/net/eth0/queues/rx-{queue}/rps_cpus"), "00");
            tree.put(&format!("sys/class/net/eth0/queues/tx-{queue}/xps_cpus"), &format!("0{}", 1 << queue));
        }
        tree
    }

    pub fn put(&self, path: &str, text: &str) {
        let path = self.0.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, format!("{text}\n")).unwrap();
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
