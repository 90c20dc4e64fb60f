//! The workers of all sources joined, and whether those that work in pairs find a partner.
//!
//! Takes addresses from flags, variables and file and the `[[workers]]` tables, gives one list. Never lets a worker in
//! that could serve nothing: a prefill worker without a decode worker of its group and backend, or the reverse.

use std::fmt;

use super::given::Given;
use super::load::{Join, Setting};
use super::mistakes::{Mistake, Origin, Wrong, quote};
use super::tables::Placed;
use super::values::{Kind, digits};
use super::{Backend, Connector, Engine, Role, WorkerSpec, WorkerUrl};
use crate::limits::MAX_WORKERS;

/// What stands in the place of a bootstrap port where the engine's own default is meant.
pub const NO_PORT: &str = "none";

/// A worker as a list of addresses names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    pub url: WorkerUrl,
    /// Port of a prefill worker's bootstrap server.
    pub port: Option<u16>,
}

/// Whether an item of a list is the bootstrap port of the address before it.
pub fn is_port(item: &str) -> bool {
    item == NO_PORT || item.bytes().all(|b| b.is_ascii_digit())
}

impl Address {
    /// Reads `URL`, or for a prefill worker `URL PORT` or `URL none`.
    ///
    /// # Errors
    /// What is wrong, and what to write instead.
    pub fn parse(role: Role, text: &str) -> Result<Address, Wrong> {
        let mut words = text.split_whitespace();
        let first = words.next().unwrap_or_default();
        if role != Role::Prefill || first.is_empty() {
            return Ok(Address { url: WorkerUrl::parse(text)?, port: None });
        }
        if is_port(first) {
            let what = format!("the port {first} has no address before it");
            return Err(Wrong::new(what, "write the address, then the port of its bootstrap server"));
        }
        let url = WorkerUrl::parse(first)?;
        let port = match words.next() {
            None | Some(NO_PORT) => None,
            Some(word) => match digits(word) {
                Some(port @ 1..=65535) => Some(port as u16),
                _ => {
                    let what = format!("{} is no bootstrap port", quote(word));
                    return Err(Wrong::new(what, "give a port from 1 to 65535, or none"));
                }
            },
        };
        match words.next() {
            None => Ok(Address { url, port }),
            Some(word) => {
                Err(Wrong::new(format!("{} follows the port of {url}", quote(word)), "one port follows an address"))
            }
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            None => write!(f, "{}", self.url),
            Some(port) => write!(f, "{} {port}", self.url),
        }
    }
}

/// A `[[workers]]` table; what it does not say of its backend the options say.
#[derive(Clone, Debug)]
pub struct Draft {
    pub spec: WorkerSpec,
    pub engine: Option<Engine>,
    pub connector: Option<Placed<Connector>>,
}

impl Join {
    /// Joins the lists of addresses, the tables and what was found elsewhere; gives the tables that are in effect, and
    /// those that were found.
    pub(super) fn workers(
        &mut self,
        sources: &[Given],
        settings: &mut [Setting],
        mut tables: Vec<Placed<Draft>>,
        found: Vec<Placed<Draft>>,
        file_names_workers: bool,
    ) -> (Vec<Placed<WorkerSpec>>, Vec<Placed<WorkerSpec>>) {
        self.replace(settings, &mut tables);
        let lists: Vec<(Role, &Given)> = settings.iter().filter_map(|setting| list(sources, setting)).collect();
        let mut all = self.addresses(&lists);
        let given: usize = lists.iter().map(|(_, given)| given.texts.len()).sum();
        let [tables, found] =
            [tables, found].map(|drafts| drafts.into_iter().map(|draft| self.finish(draft)).collect::<Vec<_>>());
        // What was given but is wrong has been told already, and may be the partner that another one lacks.
        let in_file = |m: &Mistake| file_names_workers && matches!(m.origin, Origin::File { .. });
        let on_line = |m: &Mistake| FLAGS.iter().any(|flag| m.origin == Origin::Flag((*flag).into()));
        let is_whole = all.len() == given && !self.mistakes.iter().any(|m| in_file(m) || on_line(m));
        all.extend(tables.iter().chain(&found).cloned());
        self.once_each(&all);
        self.judge(&all, settings, is_whole);
        let told = file_names_workers && !self.mistakes.is_empty();
        let config = &self.config;
        let may_be_none = config.pd_disaggregation || config.start_without_workers || config.workers_file.is_some();
        if all.is_empty() && is_whole && !told && !may_be_none {
            let fix = "give --worker-urls URL…, [[workers]] in the file, or --start-without-workers to add them later";
            self.mistakes.push(Mistake::new(Origin::Flag(FLAGS[0].into()), "there is no worker", fix));
        }
        self.config.workers = all.into_iter().map(|w| w.value).collect();
        (tables, found)
    }

    /// Workers on the command line or in the environment replace all of the file.
    fn replace(&mut self, settings: &mut [Setting], tables: &mut Vec<Placed<Draft>>) {
        let lists = || settings.iter().filter(|s| matches!(s.row.kind, Kind::Workers(_)));
        let Some(by) = lists().map(|s| &s.origin).find(|o| matches!(o, Origin::Flag(_) | Origin::Env(_))).cloned()
        else {
            return;
        };
        if !tables.is_empty() {
            let what = format!("replaces the {} [[workers]] of the file", tables.len());
            self.warnings.push(Mistake::new(by.clone(), what, "their keys and models are not used"));
            tables.clear();
        }
        for setting in settings.iter_mut().filter(|s| matches!(s.row.kind, Kind::Workers(_))) {
            if matches!(setting.origin, Origin::File { .. }) {
                let what = format!("replaces {} of the file", setting.row.key);
                let fix = format!("give {} beside it if those workers are meant too", setting.row.flag());
                self.warnings.push(Mistake::new(by.clone(), what, fix));
                (setting.origin, setting.shown) = (Origin::Default, Some("[]".into()));
            }
        }
    }

    /// The workers of the lists; what cannot be read has been told.
    fn addresses(&self, lists: &[(Role, &Given)]) -> Vec<Placed<WorkerSpec>> {
        let backend = Backend::of(self.config.engine, self.config.connector);
        let read = |role, given: &Given, at: usize| {
            let Address { url, port } = Address::parse(role, given.texts[at].trim()).ok()?;
            let spec = WorkerSpec { role, backend, bootstrap_port: port, ..WorkerSpec::new(url.to_string()) };
            Some(Placed { value: spec, origin: given.place(at).clone() })
        };
        let of_list = |&(role, given): &(Role, &Given)| {
            (0..given.texts.len()).filter_map(|at| read(role, given, at)).collect::<Vec<_>>()
        };
        lists.iter().flat_map(of_list).collect()
    }

    /// A table with the backend that it says or that the options say.
    fn finish(&mut self, table: Placed<Draft>) -> Placed<WorkerSpec> {
        let Placed { value: Draft { mut spec, engine, connector }, origin } = table;
        let engine = engine.unwrap_or(self.config.engine);
        if let Some(connector) = connector.as_ref().filter(|_| engine != Engine::Vllm) {
            let wrong = Wrong::new("is vLLM's, and this worker is SGLang", "add backend = \"vllm\", or leave it out");
            self.mistakes.push(wrong.at(&connector.origin, "connector"));
        }
        spec.backend = Backend::of(engine, connector.map_or(self.config.connector, |connector| connector.value));
        Placed { value: spec, origin }
    }

    fn once_each(&mut self, all: &[Placed<WorkerSpec>]) {
        for (at, worker) in all.iter().enumerate() {
            let (url, role) = (&worker.value.url, worker.value.role);
            let Some(first) = all[..at].iter().find(|w| w.value.url == *url) else { continue };
            let earlier = match &first.origin {
                place @ Origin::File { .. } => format!(" (first at {place})"),
                _ => String::new(),
            };
            let wrong = match first.value.role {
                same if same == role => Wrong::new(format!("{url} is given twice{earlier}"), "give each worker once"),
                other => {
                    let what = format!("{url} is given as {} and as {}{earlier}", other.name(), role.name());
                    Wrong::new(what, "one address has one role: leave one")
                }
            };
            self.mistakes.push(wrong.at(&worker.origin, "worker"));
        }
    }

    /// What is wrong or odd about the workers together.
    fn judge(&mut self, all: &[Placed<WorkerSpec>], settings: &[Setting], is_whole: bool) {
        let origin_of =
            |key: &str| settings.iter().find(|s| s.row.key == key).map_or(Origin::Default, |s| s.origin.clone());
        for worker in all.iter().filter(|w| w.value.url.ends_with("/v1")) {
            let what = format!("{} ends in /v1: requests would go to /v1/v1/…", worker.value.url);
            self.warnings.push(Wrong::new(what, "leave /v1 out").at(&worker.origin, "url"));
        }
        for worker in all.iter().filter(|w| w.value.backend == Backend::VllmNixl && w.value.bootstrap_port.is_some()) {
            let what = format!("{} has a bootstrap port, which NIXL does not use", worker.value.url);
            self.warnings
                .push(Wrong::new(what, "leave it out, or give the connector mooncake").at(&worker.origin, "url"));
        }
        let count: usize = all.iter().map(|w| w.value.dp_size.unwrap_or(1) as usize).sum();
        if count > MAX_WORKERS {
            let what = format!("{count} workers, ranks included, are more than one process can serve");
            let origin = all.last().map_or(Origin::Default, |w| w.origin.clone());
            self.mistakes.push(Mistake::new(origin, what, format!("give at most {MAX_WORKERS}")));
        }
        let engines = |engine| all.iter().any(|w| w.value.backend.engine() == engine);
        if self.config.connector == Connector::Mooncake && is_whole && !all.is_empty() && !engines(Engine::Vllm) {
            let wrong =
                Wrong::new("only vLLM has connectors, and no worker is vLLM", "add --backend vllm, or leave it out");
            self.mistakes.push(wrong.at(&origin_of("connector"), "connector"));
        }
        let paired = all.iter().any(|w| w.value.role != Role::Regular);
        if self.config.pd_disaggregation && is_whole && !paired {
            let fix = "give --prefill URL and --decode URL (or role in [[workers]]), or leave it out";
            let wrong = Wrong::new("there are no prefill and decode workers", fix);
            self.mistakes.push(wrong.at(&origin_of("pd_disaggregation"), "pd_disaggregation"));
        }
        if is_whole {
            self.partners(all);
        }
    }

    /// One mistake a group and backend in which one of the roles is missing.
    fn partners(&mut self, all: &[Placed<WorkerSpec>]) {
        let is = |w: &Placed<WorkerSpec>, role, like: &WorkerSpec| {
            (w.value.role, &w.value.group, w.value.backend) == (role, &like.group, like.backend)
        };
        for (at, worker) in all.iter().enumerate() {
            let spec = &worker.value;
            let partner = match spec.role {
                Role::Regular => continue,
                Role::Prefill => Role::Decode,
                Role::Decode => Role::Prefill,
            };
            if all.iter().any(|w| is(w, partner, spec)) || all[..at].iter().any(|w| is(w, spec.role, spec)) {
                continue;
            }
            let group =
                if spec.group.is_empty() { "no group".to_owned() } else { format!("group {}", quote(&spec.group)) };
            let what = format!(
                "{} is a {} worker without any {} worker of its group and backend ({group}, {})",
                spec.url,
                spec.role.name(),
                partner.name(),
                spec.backend.name()
            );
            let wrong = Wrong::new(what, "add one, or give both the same group and backend");
            self.mistakes.push(wrong.at(&worker.origin, "worker"));
        }
    }
}

/// Flags of the lists.
const FLAGS: [&str; 3] = ["--worker-urls", "--prefill", "--decode"];

/// The list of a role's addresses that is in effect.
fn list<'a>(sources: &'a [Given], setting: &Setting) -> Option<(Role, &'a Given)> {
    let Kind::Workers(role) = setting.row.kind else { return None };
    let given = sources.iter().find(|g| g.row.key == setting.row.key && g.origin == setting.origin)?;
    Some((role, given))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_follows_the_address_of_a_prefill_worker() {
        let read = |text: &str| Address::parse(Role::Prefill, text).map(|a| a.to_string());
        for (given, shown) in [
            ("http://a", "http://a:80"),
            ("http://a 8998", "http://a:80 8998"),
            ("http://[::1]:3  none", "http://[::1]:3"),
        ] {
            assert_eq!(read(given).as_deref(), Ok(shown), "{given}");
            assert_eq!(read(shown).as_deref(), Ok(shown), "{given}");
        }
        for (given, says) in [
            ("8998", "has no address before it"),
            ("none", "has no address before it"),
            ("http://a 0", "is no bootstrap port"),
            ("http://a 65536", "is no bootstrap port"),
            ("http://a 1 2", "follows the port of http://a:80"),
            ("", "empty"),
        ] {
            assert!(read(given).unwrap_err().what.contains(says), "{given}");
        }
        for role in [Role::Regular, Role::Decode] {
            assert!(Address::parse(role, "http://a 8998").is_err());
        }
    }
}
