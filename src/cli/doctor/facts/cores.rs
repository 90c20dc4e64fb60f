//! Cores: which there are, which this process may use, how they belong together, how much of them it gets.
//!
//! Takes a tree of files, gives plain values. Never judges.

use std::collections::BTreeMap;

use super::{Tree, line, list};

/// The cores of a host.
pub struct Cores {
    /// Those of this process's affinity mask, in order.
    pub allowed: Vec<usize>,
    pub online: Vec<usize>,
    /// Those that the control group of this process allows; `None`: it does not say.
    pub cpuset: Option<Vec<usize>>,
    /// Threads of the same physical core, itself included.
    pub siblings: BTreeMap<usize, Vec<usize>>,
    /// How the clock of a core is chosen.
    pub governors: BTreeMap<usize, String>,
    /// Cores by NUMA node.
    pub nodes: BTreeMap<usize, Vec<usize>>,
    /// Cores' worth of time that the control group allows, and the file that says so; `None`: no limit.
    pub quota: Option<(f64, String)>,
    /// Periods in which the group has run out of it.
    pub throttled: u64,
}

const CPU: &str = "sys/devices/system/cpu";
const NODES: &str = "sys/devices/system/node";
const GROUPS: &str = "sys/fs/cgroup";

impl Cores {
    /// `status` is the text of `/proc/self/status`.
    pub fn read(tree: &Tree, status: &str) -> Cores {
        let online = tree.list(&format!("{CPU}/online")).unwrap_or_default();
        let of_core = |file: &str| {
            let text = |core: &usize| tree.text(&format!("{CPU}/cpu{core}/{file}")).map(|text| (*core, text));
            online.iter().filter_map(text).collect::<BTreeMap<usize, String>>()
        };
        let node = |name: &String| {
            let number = name.strip_prefix("node")?.parse().ok()?;
            Some((number, tree.list(&format!("{NODES}/{name}/cpulist"))?))
        };
        let group = Group::read(tree);
        Cores {
            allowed: line(status, "Cpus_allowed_list:").map(list).unwrap_or_default(),
            siblings: of_core("topology/thread_siblings_list").into_iter().map(|(c, text)| (c, list(&text))).collect(),
            governors: of_core("cpufreq/scaling_governor"),
            nodes: tree.names(NODES).iter().filter_map(node).collect(),
            cpuset: group.cpuset,
            quota: group.quota,
            throttled: group.throttled,
            online,
        }
    }

    /// The node of a core.
    pub fn node_of(&self, core: usize) -> Option<usize> {
        self.nodes.iter().find(|(_, cores)| cores.contains(&core)).map(|(node, _)| *node)
    }
}

/// What control groups allow.
#[derive(Default)]
struct Group {
    cpuset: Option<Vec<usize>>,
    quota: Option<(f64, String)>,
    throttled: u64,
}

impl Group {
    /// Version 2 if this process is in a group of it that has the controller, else version 1.
    fn read(tree: &Tree) -> Group {
        let text = tree.text("proc/self/cgroup").unwrap_or_default();
        let path_of = |controller: &str| {
            text.lines().find_map(|line| {
                let (_, rest) = line.split_once(':')?;
                let (controllers, path) = rest.split_once(':')?;
                controllers.split(',').any(|c| c == controller).then(|| path.to_owned())
            })
        };
        let mut group = Group::default();
        if let Some(path) = path_of("") {
            group.cpuset = tree.list(&format!("{GROUPS}{path}/cpuset.cpus.effective"));
            for dir in upward(GROUPS, &path) {
                let file = format!("{dir}/cpu.max");
                group.narrow(tree.text(&file).and_then(|text| cpu_max(&text)), file);
            }
            group.count(tree.text(&format!("{GROUPS}{path}/cpu.stat")));
        }
        if let Some(path) = path_of("cpu") {
            let mount = format!("{GROUPS}/cpu");
            for dir in upward(&mount, &path) {
                let file = format!("{dir}/cpu.cfs_quota_us");
                let quota: Option<f64> = tree.text(&file).and_then(|text| text.parse().ok()).filter(|q| *q > 0.0);
                let period = tree.number(&format!("{dir}/cpu.cfs_period_us")).filter(|p| *p > 0);
                group.narrow(quota.zip(period).map(|(quota, period)| quota / period as f64), file);
            }
            group.count(tree.text(&format!("{mount}{path}/cpu.stat")));
        }
        if let (None, Some(path)) = (&group.cpuset, path_of("cpuset")) {
            group.cpuset = tree.list(&format!("{GROUPS}/cpuset{path}/cpuset.effective_cpus"));
        }
        group
    }

    fn narrow(&mut self, cores: Option<f64>, file: String) {
        let Some(cores) = cores else { return };
        if self.quota.as_ref().is_none_or(|(least, _)| cores < *least) {
            self.quota = Some((cores, format!("/{file}")));
        }
    }

    fn count(&mut self, stat: Option<String>) {
        let throttled = stat.and_then(|text| line(&text, "nr_throttled ")?.parse().ok());
        self.throttled = self.throttled.max(throttled.unwrap_or(0));
    }
}

/// A group's directory and all above it: each may have a limit of its own.
fn upward(mount: &str, path: &str) -> Vec<String> {
    let mut dirs = vec![mount.to_owned()];
    for part in path.split('/').filter(|part| !part.is_empty() && *part != "..") {
        dirs.push(format!("{}/{part}", dirs[dirs.len() - 1]));
    }
    dirs
}

/// `max 100000` is no limit, `150000 100000` one and a half cores.
fn cpu_max(text: &str) -> Option<f64> {
    let (quota, period) = text.split_once(' ')?;
    let (quota, period): (f64, f64) = (quota.parse().ok()?, period.parse().ok()?);
    (period > 0.0).then_some(quota / period)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotas_are_cores() {
        assert_eq!(cpu_max("max 100000"), None);
        assert_eq!(cpu_max("150000 100000"), Some(1.5));
        assert_eq!(cpu_max("150000 0"), None);
        assert_eq!(upward("g", "/a/b"), ["g", "g/a", "g/a/b"]);
        assert_eq!(upward("g", "/"), ["g"]);
    }

    #[test]
    fn the_narrowest_group_counts() {
        let mut group = Group::default();
        for (cores, file) in [(Some(4.0), "a"), (None, "b"), (Some(1.5), "c"), (Some(2.0), "d")] {
            group.narrow(cores, file.to_owned());
        }
        assert_eq!(group.quota, Some((1.5, "/c".to_owned())));
        group.count(Some("nr_periods 10\nnr_throttled 3\n".to_owned()));
        group.count(None);
        assert_eq!(group.throttled, 3);
    }
}
