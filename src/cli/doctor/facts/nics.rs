//! Network cards: their queues, and which cores these interrupt.
//!
//! Takes a tree of files, gives plain values. Never judges; never knows interfaces without a device of their own
//! (loopback, bridges, VLANs).

use std::collections::BTreeMap;

use super::Tree;

/// A card that is up.
pub struct Nic {
    /// Its interface.
    pub name: String,
    /// Its NUMA node; `None`: there is one, or nobody knows.
    pub node: Option<usize>,
    /// Interrupts of its queues.
    pub interrupts: Vec<Interrupt>,
    pub rx_queues: usize,
    pub tx_queues: usize,
    /// Some queue's packets are passed on to other cores by an interrupt between cores (RPS).
    pub has_rps: bool,
    /// Some core has a queue of its own to send by (XPS).
    pub has_xps: bool,
}

/// An interrupt and the cores that may take it.
pub struct Interrupt {
    pub number: u64,
    pub cores: Vec<usize>,
}

/// Parts of the names of interrupts that bring no packets.
const NOT_QUEUES: [&str; 9] = ["config", "event", "async", "pages_eq", "cmd_eq", "mgmnt", "mgmt", "misc", "inflate"];

/// All cards that are up.
pub fn read(tree: &Tree) -> Vec<Nic> {
    let names = names_of_interrupts(&tree.text("proc/interrupts").unwrap_or_default());
    let is_up = |name: &String| {
        let dir = format!("sys/class/net/{name}");
        let state = tree.text(&format!("{dir}/operstate"));
        tree.exists(&format!("{dir}/device")) && !matches!(state.as_deref(), Some("down" | "notpresent"))
    };
    tree.names("sys/class/net").into_iter().filter(is_up).map(|name| card(tree, name, &names)).collect()
}

fn card(tree: &Tree, name: String, names: &BTreeMap<u64, String>) -> Nic {
    let dir = format!("sys/class/net/{name}");
    let queues = tree.names(&format!("{dir}/queues"));
    let is_set = |kind: &str, file: &str| {
        let masks = queues.iter().filter(|q| q.starts_with(kind));
        masks.filter_map(|q| tree.text(&format!("{dir}/queues/{q}/{file}"))).any(|mask| is_mask_set(&mask))
    };
    Nic {
        node: tree.number(&format!("{dir}/device/numa_node")).map(|n| n as usize),
        interrupts: interrupts(tree, &name, names),
        rx_queues: queues.iter().filter(|q| q.starts_with("rx-")).count(),
        tx_queues: queues.iter().filter(|q| q.starts_with("tx-")).count(),
        has_rps: is_set("rx-", "rps_cpus"),
        has_xps: is_set("tx-", "xps_cpus"),
        name,
    }
}

/// Interrupts of a card's queues: those of its device, or of the bus device that a virtual one sits on, or those that
/// bear its name.
fn interrupts(tree: &Tree, name: &str, names: &BTreeMap<u64, String>) -> Vec<Interrupt> {
    let dir = format!("sys/class/net/{name}/device");
    let of_device = [format!("{dir}/msi_irqs"), format!("{dir}/../msi_irqs")];
    let mut numbers: Vec<u64> = of_device
        .iter()
        .map(|dir| tree.names(dir).iter().filter_map(|n| n.parse().ok()).collect::<Vec<u64>>())
        .find(|numbers| !numbers.is_empty())
        .unwrap_or_default();
    if numbers.is_empty() {
        let named = |text: &str| text.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| word == name);
        numbers = names.iter().filter(|(_, text)| named(text)).map(|(number, _)| *number).collect();
    }
    let is_queue = |n: &u64| names.get(n).is_some_and(|text| !NOT_QUEUES.iter().any(|not| text.contains(not)));
    numbers.sort_unstable();
    numbers.into_iter().filter(is_queue).map(|number| Interrupt { number, cores: cores(tree, number) }).collect()
}

/// The cores that an interrupt goes to, else those that it may go to.
fn cores(tree: &Tree, number: u64) -> Vec<usize> {
    let of = |file: &str| tree.list(&format!("proc/irq/{number}/{file}")).filter(|cores| !cores.is_empty());
    of("effective_affinity_list").or_else(|| of("smp_affinity_list")).unwrap_or_default()
}

/// Number and name of every numbered row of `/proc/interrupts`: what stands behind the counts.
fn names_of_interrupts(text: &str) -> BTreeMap<u64, String> {
    let columns = text.lines().next().map_or(0, |head| head.split_whitespace().count());
    let row = |line: &str| {
        let (number, rest) = line.split_once(':')?;
        let name: Vec<&str> = rest.split_whitespace().skip(columns).collect();
        Some((number.trim().parse().ok()?, name.join(" ")))
    };
    text.lines().skip(1).filter_map(row).collect()
}

/// Whether a mask such as `00000000,0000000f` has any bit.
fn is_mask_set(mask: &str) -> bool {
    mask.chars().any(|c| c.is_ascii_hexdigit() && c != '0')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_interrupts_are_named_behind_their_counts() {
        let text = "           CPU0       CPU1\n 24:   1   0  IR-PCI-MSIX-0000:01:00.0  1-edge  eth0-TxRx-0\nNMI:  0  0  Non-maskable interrupts\n";
        let names = names_of_interrupts(text);
        assert_eq!(names.len(), 1);
        assert!(names[&24].ends_with("eth0-TxRx-0"), "{names:?}");
    }

    #[test]
    fn masks_of_zeros_are_none() {
        assert!(!is_mask_set("00000000,00000000") && is_mask_set("00000000,00000010") && !is_mask_set(""));
    }
}
