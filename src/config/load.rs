//! All sources joined: flag over variable over file over default.
//!
//! Takes what each source gives, gives one [`Config`] with the origin of every value, or every mistake at once.
//! Never lets a mistake hide another one: values that lose are checked too.

use std::net::IpAddr;
use std::time::Duration;

use super::discovery;
use super::environment::{self, CONFIG_VARIABLE};
use super::flags::{CONFIG_FLAG, FromFlags};
use super::given::Given;
use super::mistakes::{Mistake, Origin, Wrong, quote};
use super::options::{OPTIONS, Row};
use super::source::Files;
use super::tables::Placed;
use super::toml::{self, FromFile};
use super::values::size;
use super::{Config, ExtraRoute, WorkerSpec};

/// A value in effect.
#[derive(Clone)]
pub struct Setting {
    pub row: &'static Row,
    /// The value as TOML; `None`: not set.
    pub shown: Option<String>,
    /// The raw value, or the items of a list.
    pub(super) texts: Vec<String>,
    pub origin: Origin,
}

/// A configuration without mistakes.
#[derive(Clone)]
pub struct Loaded {
    pub config: Config,
    /// What should be looked at but stops nothing.
    pub warnings: Vec<Mistake>,
    /// The file that was read.
    pub file: Option<String>,
    /// One per option, in table order.
    pub settings: Vec<Setting>,
    /// Workers of `[[workers]]` that are in effect.
    pub(super) tables: Vec<Placed<WorkerSpec>>,
    /// Workers of `workers_file`.
    pub(super) found: Vec<Placed<WorkerSpec>>,
    pub(super) extra_routes: Vec<Placed<ExtraRoute>>,
}

/// The default of an option as raw texts.
pub fn default_texts(row: &'static Row) -> Vec<String> {
    if row.kind.is_list() && row.default.is_empty() {
        return Vec::new();
    }
    Given::new(row, Origin::Default, vec![row.default.to_owned()]).texts
}

/// Joins flags, environment and the files that they name.
///
/// # Errors
/// Every mistake that was found, in the order flags, variables, file.
pub fn load(
    flags: FromFlags,
    environment: &[(String, Option<String>)],
    files: impl Files,
) -> Result<Loaded, Vec<Mistake>> {
    let env = environment::read(environment);
    let mut mistakes = flags.mistakes;
    mistakes.extend(env.mistakes);
    let named = match (flags.config_file, env.config_file) {
        (Some(name), _) => Some((name, Origin::Flag(format!("--{CONFIG_FLAG}")))),
        (None, Some(name)) => Some((name, Origin::Env(CONFIG_VARIABLE.to_owned()))),
        (None, None) => None,
    };
    let mut file = named.as_ref().map_or_else(FromFile::default, |(name, origin)| open(name, origin, &files));
    mistakes.append(&mut file.mistakes);

    let mut join = Join { config: Config::with_workers(Vec::new()), mistakes, warnings: env.warnings };
    let sources: Vec<Given> = file.given.into_iter().chain(env.given).chain(flags.given).collect();
    let mut settings = join.settle(&sources);
    let mut found = discovery::Found::default();
    if let Some(name) = &join.config.workers_file {
        let origin = &settings.iter().find(|s| s.row.key == "workers_file").expect("a row of the table").origin;
        found = discovery::read(name, origin, &files);
        file.names_workers |= !found.mistakes.is_empty();
        join.mistakes.append(&mut found.mistakes);
    }
    let (tables, found) = join.workers(&sources, &mut settings, file.workers, found.workers, file.names_workers);
    join.config.extra_routes = file.extra_routes.iter().map(|r| r.value.clone()).collect();
    join.cross_check(&settings);

    let Join { config, mut mistakes, warnings } = join;
    if !mistakes.is_empty() {
        mistakes.sort_by_key(|m| m.origin.rank());
        return Err(mistakes);
    }
    let file_name = named.map(|(name, _)| name);
    Ok(Loaded { config, warnings, file: file_name, settings, tables, found, extra_routes: file.extra_routes })
}

fn open(name: &str, origin: &Origin, files: &impl Files) -> FromFile {
    match files.read(name) {
        Ok(text) => toml::read(name, &text),
        Err(error) => {
            let what = format!("cannot read {}: {error}", quote(name));
            let mistakes = vec![Mistake::new(origin.clone(), what, "name a readable TOML file")];
            FromFile { mistakes, names_workers: true, ..FromFile::default() }
        }
    }
}

/// All sources while they are joined.
pub(super) struct Join {
    pub(super) config: Config,
    pub(super) mistakes: Vec<Mistake>,
    pub(super) warnings: Vec<Mistake>,
}

impl Join {
    /// Reads every value and keeps, per option, that of the last source in `sources`.
    fn settle(&mut self, sources: &[Given]) -> Vec<Setting> {
        let mut scratch = self.config.clone();
        let mut settings = Vec::with_capacity(OPTIONS.len());
        for row in OPTIONS {
            let mut winner = None;
            for given in sources.iter().filter(|g| g.row.key == row.key) {
                match row.kind.put(&mut scratch, &given.texts) {
                    Ok(_) => winner = Some(given),
                    Err(wrongs) => self.mistakes.extend(wrongs.into_iter().map(|(at, w)| given.mistake(at, w))),
                }
            }
            let origin = winner.map_or(Origin::Default, |given| given.origin.clone());
            let texts = winner.map_or_else(|| default_texts(row), |given| given.texts.clone());
            let shown = row.kind.put(&mut self.config, &texts).ok().flatten();
            settings.push(Setting { row, shown, texts, origin });
        }
        settings
    }

    fn cross_check(&mut self, settings: &[Setting]) {
        let origin_of = |key: &str| &settings.iter().find(|s| s.row.key == key).expect("a row of the table").origin;
        // The place to change: where the user said something.
        let blame = |first: &str, second: &str| match origin_of(first) {
            Origin::Default if *origin_of(second) == Origin::Default => (Origin::Default, first.to_owned()),
            Origin::Default => (origin_of(second).clone(), second.to_owned()),
            origin => (origin.clone(), first.to_owned()),
        };
        let c = &self.config;
        if c.port == c.metrics_port && c.port != 0 && hosts_overlap(c.host, c.metrics_host) {
            let (origin, key) = blame("prometheus_port", "port");
            let what = format!("port and prometheus_port are both {} on {}", c.port, c.host);
            self.mistakes.push(Wrong::new(what, "give them different ports").at(&origin, &key));
        }
        if c.strangers_may_manage() {
            let what = format!("whoever reaches {} can add and remove workers", c.metrics_host);
            let fix = "give --admin-token, or --admin-open if nobody does who may not";
            self.mistakes.push(Wrong::new(what, fix).at(origin_of("prometheus_host"), "prometheus_host"));
        }
        if c.max_payload_bytes > c.body_memory_bytes {
            let (origin, key) = blame("max_payload_size", "body_memory");
            let (payload, memory) = (size(c.max_payload_bytes), size(c.body_memory_bytes));
            let what = format!("a body of max_payload_size ({payload}) does not fit into body_memory ({memory})");
            self.mistakes.push(Wrong::new(what, "raise body_memory or lower max_payload_size").at(&origin, &key));
        }
        if c.pool_idle > ENGINE_MARGIN {
            let what = format!(
                "{} ms is close to or above the 5 s after which engines close idle connections",
                c.pool_idle.as_millis()
            );
            self.warnings.push(Wrong::new(what, "stay at or below 4500").at(origin_of("pool_idle_ms"), "pool_idle_ms"));
        }
        if let Some(core) = c.control_core.filter(|core| c.cores.contains(core)) {
            let what = format!("core {core} is a lane's too");
            let fix = "requests on that lane wait for control work; give another core if there is one";
            self.warnings.push(Wrong::new(what, fix).at(origin_of("control_core"), "control_core"));
        }
    }
}

/// Idle limit above which a request may be sent on a connection that the engine (uvicorn: 5 s) is just closing.
const ENGINE_MARGIN: Duration = Duration::from_millis(4500);

/// Whether two listeners with the same port would collide. `::` takes IPv4 too.
fn hosts_overlap(a: IpAddr, b: IpAddr) -> bool {
    let takes = |wide: IpAddr, other: IpAddr| wide.is_unspecified() && (wide.is_ipv6() || other.is_ipv4());
    a == b || takes(a, b) || takes(b, a)
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::super::values::Kind;
    use super::super::{Backend, ClientLeaves, Policy, Role, Secret, flags};
    use super::*;

    fn try_load(args: &[&str], env: &[(&str, &str)], file: Option<&str>) -> Result<Loaded, Vec<String>> {
        let mut args: Vec<String> = args.iter().map(|a| (*a).to_owned()).collect();
        if file.is_some() {
            args.extend(["--config".to_owned(), "c.toml".to_owned()]);
        }
        let env: Vec<_> = env.iter().map(|(k, v)| ((*k).to_owned(), Some((*v).to_owned()))).collect();
        let flags = flags::read(&flags::command("serve", "Serves."), &args).expect("clap has nothing to say");
        let read = |_: &str| file.map(str::to_owned).ok_or(io::Error::from(io::ErrorKind::NotFound));
        load(flags, &env, read).map_err(|mistakes| mistakes.iter().map(Mistake::to_string).collect())
    }

    fn good(args: &[&str], env: &[(&str, &str)], file: Option<&str>) -> Loaded {
        try_load(args, env, file).unwrap_or_else(|mistakes| panic!("{mistakes:#?}"))
    }

    fn bad(args: &[&str], env: &[(&str, &str)], file: Option<&str>) -> Vec<String> {
        try_load(args, env, file).err().expect("mistakes")
    }

    const W: [&str; 2] = ["--worker-urls", "http://w:1"];

    #[test]
    fn flag_wins_over_variable_over_file_over_default() {
        let file = Some("port = 3\nworker_urls = ['http://w:1']");
        let port = |args: &[&str], env: &[(&str, &str)], file| good(args, env, file).config.port;
        assert_eq!(port(&["--port", "1"], &[("CORELANE_PORT", "2")], file), 1);
        assert_eq!(port(&[], &[("CORELANE_PORT", "2")], file), 2);
        assert_eq!(port(&[], &[("CORELANE_PORT", "")], file), 3);
        assert_eq!(port(&W, &[], None), 30000);
    }

    #[test]
    fn statuses_are_numbers_or_texts() {
        for list in ["[503, 429]", "['503', '429']"] {
            let file = format!("retry_statuses = {list}");
            assert_eq!(good(&W, &[], Some(&file)).config.retry.statuses, [503, 429]);
        }
        assert!(good(&W, &[], Some("retry_statuses = ['none']")).config.retry.statuses.is_empty());
    }

    #[test]
    fn a_switch_can_be_switched_back() {
        let file = Some("disable_retries = true\nretry_max_retries = 7\ndisable_health_check = true");
        let config = good(&W, &[], file).config;
        assert_eq!((config.max_attempts, config.health_check), (1, false));
        let config = good(&[W[0], W[1], "--disable-retries=false", "--disable-health-check=0"], &[], file).config;
        assert_eq!((config.max_attempts, config.health_check), (7, true));
        let config = good(&[W[0], W[1], "--disable-retries"], &[("CORELANE_RETRY_MAX_RETRIES", "9")], None).config;
        assert_eq!(config.max_attempts, 1);
    }

    #[test]
    fn worker_urls_come_in_any_form() {
        let urls = |args: &[&str], env: &[(&str, &str)]| -> Vec<String> {
            good(args, env, None).config.workers.into_iter().map(|w| w.url).collect()
        };
        let three = ["http://a:80", "http://b:80", "http://c:80"];
        assert_eq!(urls(&["--worker-urls", "http://a", "http://b", "http://c"], &[]), three);
        assert_eq!(
            urls(&["--worker-urls", "http://a", "http://b", "--port", "1", "--worker-urls=http://c"], &[]),
            three
        );
        assert_eq!(urls(&["--worker-urls", "http://a,http://b, http://c"], &[]), three);
        assert_eq!(urls(&[], &[("CORELANE_WORKER_URLS", "http://a http://b,http://c")]), three);
    }

    #[test]
    fn tables_add_to_the_files_urls_and_yield_to_flags() {
        let file = Some("worker_urls = ['http://a']\n[[workers]]\nurl = 'http://b'\napi_key = 'k'\nmodels = ['m']");
        let workers = good(&[], &[], file).config.workers;
        assert_eq!(workers.len(), 2);
        assert_eq!((workers[1].api_key.as_deref(), &workers[1].models[..]), (Some("k"), &["m".to_owned()][..]));
        let loaded = good(&W, &[], file);
        assert_eq!(loaded.config.workers.len(), 1);
        assert!(loaded.warnings[0].to_string().starts_with("--worker-urls: replaces the 1 [[workers]]"));
    }

    #[test]
    fn all_mistakes_come_at_once_in_order() {
        let file = "prot = 1\nport = 'x'\n\n[[workers]]\nurl = 'https://w'\nmodel = 'm'\n\n[[extra_routes]]\npath = '/health'\n";
        let args = ["--worker-urls", "w:1", "--max-paylod-size", "1", "2", "--selector", "a", "none", "--port", "-1"];
        let env = [("CORELANE_POLICY", "cache_awre"), ("CORELANE_CORS_ALLOWED_ORIGINS", "*")];
        let told = bad(&args, &env, Some(file));
        let wanted = [
            "--max-paylod-size: no such flag; did you mean --max-payload-size?",
            "--selector: not supported yet (service discovery); leave it out",
            r#"--port: "-1" is out of range; give a whole number from 0 to 65535"#,
            r#"--worker-urls: "w:1" has no scheme; put http:// before it"#,
            "CORELANE_CORS_ALLOWED_ORIGINS: not supported yet (CORS); unset it",
            r#"CORELANE_POLICY: "cache_awre" is not known; did you mean cache_aware? give one of cache_aware, least_load, power_of_two, random, round_robin, prefix_hash, consistent_hashing, manual, bucket, passthrough"#,
            r#"c.toml:1:1: "prot": no such key; did you mean port?"#,
            r#"c.toml:2:8: port: "x" is not a whole number; give a whole number from 0 to 65535"#,
            r#"c.toml:5:7: url: "https://w" asks for TLS, which is not supported towards workers; use http:// and terminate TLS beside the worker"#,
            r#"c.toml:6:1: "model": no such key; did you mean models?"#,
            r#"c.toml:9:8: path: "/health" overlaps with the built-in route /health; leave it out"#,
        ];
        assert_eq!(told, wanted, "{told:#?}");
    }

    #[test]
    fn values_that_lose_are_checked_too() {
        let told = bad(&["--port", "1", W[0], W[1]], &[("CORELANE_PORT", "x")], Some("port = 70000"));
        assert_eq!(told.len(), 2, "{told:#?}");
    }

    #[test]
    fn the_command_line_is_told_what_is_missing_or_too_much() {
        let told =
            bad(&["--port", "--host=", W[0], W[1], "--policy", "random", "--policy", "random", "--", "x"], &[], None);
        assert!(told.iter().any(|m| m.starts_with("--port: needs a value (a whole number")), "{told:#?}");
        assert!(told.iter().any(|m| m.starts_with("--host: the value is empty")), "{told:#?}");
        assert!(told.iter().any(|m| m.starts_with("--policy: has 2 values")), "{told:#?}");
        let told = bad(&["stray", "--port", "1", "2", "-x", "--disable-retries", "true", W[0], W[1]], &[], None);
        assert_eq!(told.iter().filter(|m| m.contains("belongs to no flag")).count(), 3, "{told:#?}");
        assert!(told.iter().any(|m| m.starts_with("-x: no such flag")), "{told:#?}");
        assert!(told.iter().any(|m| m.ends_with("write --disable-retries=true")), "{told:#?}");
        let told = bad(&["a/good.toml"], &[], None);
        assert!(told[0].ends_with("belongs to no flag; did you mean --config a/good.toml?"), "{told:#?}");
    }

    #[test]
    fn the_wrong_toml_type_is_named() {
        for (file, says) in [
            ("port = true", "c.toml:1:8: port: is true or false; give a whole number from 0 to 65535"),
            ("policy = 1", "c.toml:1:10: policy: is a whole number; give one of"),
            ("disable_retries = 'true'", "c.toml:1:19: disable_retries: is a text; give true or false"),
            ("worker_urls = [1]", "c.toml:1:16: worker_urls: an item is a whole number; list texts in quotes"),
            ("[port]\nx = 1", "c.toml:1:1: port: is a table; give"),
            ("workers = 1", "c.toml:1:1: workers: is no list of tables; begin each with [[workers]]"),
            ("[[workers]]\nmodels = []", "c.toml:1:1: url: is missing; add url = \"…\""),
            ("[[workers]]\nurl='http://10.0.0.1'\nexpand = true", "c.toml:3:10: expand: is for names, and this worker"),
            ("[[workers]]\nurl='http://a'\nexpand = 1", "c.toml:3:10: expand: is a whole number; give true or false"),
            ("[[workers]]\nurl='http://a'\nrole = 7", "c.toml:3:8: role: is a whole number; give a text"),
            ("[[workers]]\nurl='http://a'\nmodels = ['m', 'm']", "c.toml:3:16: models: \"m\" is listed twice"),
            (
                "[[extra_routes]]\npath='/x'\nmethods = ['get']",
                "c.toml:3:12: methods: \"get\" is no method that is passed on; write GET",
            ),
            (
                "[[extra_routes]]\npath='/x/a%2Fb'",
                "c.toml:2:6: path: \"/x/a%2Fb\" has a segment . or .., or an encoded",
            ),
            (
                "[[extra_routes]]\npath='/x\\y'",
                "c.toml:2:6: path: \"/x\\\\y\" has a backslash, which a worker may take for a slash; write / where",
            ),
            ("[[extra_routes]]\npath='/x/a%5Cb'", "c.toml:2:6: path: \"/x/a%5Cb\" has a backslash, which"),
            (
                "[[extra_routes]]\npath='/x/*'\n[[extra_routes]]\npath='/x/y'",
                "c.toml:4:6: path: /x/y overlaps with /x/* at c.toml:2:6",
            ),
            ("a = = 1", "c.toml:1:5: no TOML"),
            ("port = 1\nport = 2", "c.toml:2:1: no TOML: duplicate key \"port\"; correct the syntax"),
            ("ä = 1\n", "c.toml:1:1: no TOML"),
        ] {
            let told = bad(&[], &[], Some(file));
            assert!(told.iter().any(|m| m.starts_with(says)), "{file}: {told:#?}");
            assert!(told.iter().all(|m| !m.contains('\n')), "{told:#?}");
        }
    }

    #[test]
    fn columns_count_characters() {
        let told = bad(&W, &[], Some("default_model = 'ä' # ö\n  'ü' = 1"));
        assert_eq!(told, ["c.toml:2:3: \"ü\": no such key; leave it out; corelane serve --help lists all"]);
    }

    #[test]
    fn workers_are_needed_and_unique() {
        assert_eq!(
            bad(&[], &[], None),
            [
                "--worker-urls: there is no worker; give --worker-urls URL…, [[workers]] in the file, or --start-without-workers to add them later"
            ]
        );
        assert!(good(&["--start-without-workers"], &[], None).config.workers.is_empty());
        let file = "worker_urls = ['http://a', 'http://b']\n[[workers]]\nurl = 'http://A:80/'";
        let told = bad(&[], &[], Some(file));
        assert_eq!(
            told,
            ["c.toml:3:7: worker: http://a:80 is given twice (first at c.toml:1:16); give each worker once"]
        );
    }

    #[test]
    fn options_must_fit_together() {
        let told = |args: &[&str]| bad(&[&W[..], args].concat(), &[], None);
        assert!(told(&["--port", "29000"])[0].starts_with("--port: port and prometheus_port are both 29000"));
        assert!(told(&["--prometheus-port", "30000"])[0].starts_with("--prometheus-port: port and"));
        let both_wide = ["--port", "29000", "--host", "::", "--prometheus-host", "0.0.0.0"];
        assert!(told(&both_wide)[0].contains("give them different ports"));
        let too_small = ["--max-payload-size", "4095MiB", "--body-memory", "4GiB"];
        good(&[&W[..], &too_small].concat(), &[], None);
        let too_small = ["--max-payload-size", "2GiB", "--body-memory", "1GiB"];
        assert!(told(&too_small)[0].starts_with("--max-payload-size: a body of"));
        assert!(told(&["--max-payload-size", "4GiB"])[0].contains("out of range; give a size from 1KiB to 4095MiB"));
        assert!(told(&["--body-memory", "100MiB"])[0].starts_with("--body-memory: a body of"));
        for fine in [&["--port", "0", "--prometheus-port", "0"][..], &["--port", "29000", "--host", "10.0.0.1"]] {
            good(&[&W[..], fine].concat(), &[], None);
        }
    }

    #[test]
    fn warnings_stop_nothing() {
        let warned = |args: &[&str], env: &[(&str, &str)]| {
            let loaded = good(&[&W[..], args].concat(), env, None);
            loaded.warnings.iter().map(Mistake::to_string).collect::<Vec<_>>().join("\n")
        };
        assert!(warned(&["--pool-idle-ms", "4501"], &[]).starts_with("--pool-idle-ms: 4501 ms is close to"));
        assert!(warned(&["--cores", "0-1", "--control-core", "1"], &[]).contains("core 1 is a lane's too"));
        assert_eq!(
            warned(&["--worker-urls", "http://b:1/x/v1/"], &[]),
            "--worker-urls: http://b:1/x/v1 ends in /v1: requests would go to /v1/v1/…; leave /v1 out"
        );
        assert_eq!(
            warned(&[], &[("CORELANE_PROT", "1")]),
            "CORELANE_PROT: no option has this name; did you mean CORELANE_PORT?"
        );
        assert_eq!(warned(&["--pool-idle-ms", "4500"], &[("CORELANE_POLICY", "")]), "");
    }

    #[test]
    fn kubernetes_service_links_are_recognised() {
        let told = bad(&W, &[("CORELANE_PORT", "tcp://10.0.0.1:30000")], None);
        assert!(told[0].contains("enableServiceLinks"), "{told:#?}");
    }

    #[test]
    fn a_file_that_cannot_be_read_is_one_mistake() {
        let args: Vec<String> = ["--config", "nowhere.toml"].map(str::to_owned).to_vec();
        let flags = flags::read(&flags::command("serve", "Serves."), &args).unwrap();
        let told = load(flags, &[], |_: &str| Err(io::Error::from(io::ErrorKind::NotFound))).err().unwrap();
        assert_eq!(told.len(), 1);
        assert!(told[0].to_string().starts_with("--config: cannot read \"nowhere.toml\""), "{}", told[0]);
    }

    #[test]
    fn every_option_round_trips_through_flag_variable_and_file() {
        for row in OPTIONS.iter().filter(|row| !["worker_urls", "workers_file"].contains(&row.key)) {
            let sample = sample(row);
            let beside = beside(row);
            let args: Vec<&str> = W.iter().chain(beside).copied().collect();
            let by_hand = format!("{}={sample}", row.flag());

            let shown = |loaded: &Loaded| loaded.settings.iter().find(|s| s.row.key == row.key).unwrap().shown.clone();
            let by_flag = good(&[&args[..], &[&*by_hand]].concat(), &[], None);
            let by_env = good(&args, &[(&*row.env(), &*sample)], None);
            assert_eq!(shown(&by_flag), shown(&by_env), "{}", row.key);
            assert_eq!(format!("{:?}", by_flag.config), format!("{:?}", by_env.config), "{}", row.key);
            if !matches!(row.kind, Kind::Workers(_)) {
                let plain = good(&args, &[], None);
                let toml = format!("{} = {}", row.key, shown(&by_flag).unwrap());
                let by_file = good(&args, &[], Some(&toml));
                assert_ne!(shown(&by_flag), shown(&plain), "{} is at its default", row.key);
                assert_eq!(shown(&by_flag), shown(&by_file), "{}", row.key);
                assert_eq!(format!("{:?}", by_flag.config), format!("{:?}", by_file.config), "{}", row.key);
                assert_ne!(format!("{:?}", by_flag.config), format!("{:?}", plain.config), "{}", row.key);
            }
        }
    }

    /// What a sample value needs beside it.
    fn beside(row: &Row) -> &'static [&'static str] {
        match row.key {
            "prefill" => &["--decode", "http://d:1"],
            "decode" => &["--prefill", "http://p:1"],
            "pd_disaggregation" => &["--prefill", "http://p:1", "--decode", "http://d:1"],
            "connector" => &["--backend", "vllm"],
            _ => &[],
        }
    }

    /// Workers as the tests below compare them.
    fn workers(loaded: &Loaded) -> Vec<(&str, Role, Option<u16>, Backend, &str)> {
        let of = |w: &'static WorkerSpec| (&*w.url, w.role, w.bootstrap_port, w.backend, &*w.group);
        Box::leak(loaded.config.workers.clone().into_boxed_slice()).iter().map(of).collect()
    }

    #[test]
    fn pairs_come_from_flags_variables_and_the_file_alike() {
        let wanted = [
            ("http://p:1", Role::Prefill, Some(8998), Backend::Sglang, ""),
            ("http://q:80", Role::Prefill, None, Backend::Sglang, ""),
            ("http://r:1", Role::Prefill, None, Backend::Sglang, ""),
            ("http://d:1", Role::Decode, None, Backend::Sglang, ""),
            ("http://e:1", Role::Decode, None, Backend::Sglang, ""),
        ];
        let flags = ["--prefill", "http://p:1", "8998", "--prefill", "http://q", "none", "--prefill=http://r:1"];
        let by_flags =
            good(&[&flags[..], &["--decode", "http://d:1", "http://e:1", "--pd-disaggregation"]].concat(), &[], None);
        assert_eq!(workers(&by_flags), wanted);
        let env = [
            ("CORELANE_PREFILL", "http://p:1 8998, http://q none,http://r:1"),
            ("CORELANE_DECODE", "http://d:1,http://e:1"),
        ];
        assert_eq!(workers(&good(&[], &env, None)), wanted);
        let lists =
            "prefill = ['http://p:1 8998', 'http://q', 'http://r:1 none']\ndecode = ['http://d:1', 'http://e:1']";
        assert_eq!(workers(&good(&[], &[], Some(lists))), wanted);
        assert!(by_flags.config.has_pairs());
        assert!(
            by_flags.summary().contains("5 workers (3 prefill, 2 decode), cache_aware, "),
            "{}",
            by_flags.summary()
        );
    }

    #[test]
    fn tables_say_more_of_a_worker() {
        let file = "connector = 'mooncake'\ndecode_policy = 'round_robin'
            [[workers]]\nurl = 'http://p'\nrole = 'prefill'\nbackend = 'vllm'\ngroup = 'a'\nbootstrap_port = 8998\ndp_size = 8
            [[workers]]\nurl = 'http://d'\nrole = 'decode'\nbackend = 'vllm'\ngroup = 'a'\nconnector = 'mooncake'
            [[workers]]\nurl = 'http://q'\nrole = 'prefill'\nbootstrap_port = 'none'
            [[workers]]\nurl = 'http://e'\nrole = 'decode'\nbackend = 'sglang'
            [[workers]]\nurl = 'http://r'";
        let loaded = good(&[], &[], Some(file));
        assert_eq!(
            workers(&loaded),
            [
                ("http://p:80", Role::Prefill, Some(8998), Backend::VllmMooncake, "a"),
                ("http://d:80", Role::Decode, None, Backend::VllmMooncake, "a"),
                ("http://q:80", Role::Prefill, None, Backend::Sglang, ""),
                ("http://e:80", Role::Decode, None, Backend::Sglang, ""),
                ("http://r:80", Role::Regular, None, Backend::Sglang, ""),
            ]
        );
        assert_eq!(loaded.config.workers[0].dp_size, Some(8));
        assert_eq!(loaded.config.policy_of(Role::Decode), Policy::RoundRobin);
        let summary = loaded.summary();
        assert!(
            summary.contains(
                "(2 prefill, 2 decode, 1 regular), cache_aware, prefill by cache_aware, decode by round_robin,"
            ),
            "{summary}"
        );
        let again = good(&[], &[], Some(&loaded.to_toml()));
        assert_eq!(format!("{:?}", again.config), format!("{:?}", loaded.config), "what is printed can be read");
    }

    #[test]
    fn pairs_that_make_no_sense_are_refused() {
        let pair = ["--prefill", "http://p", "--decode", "http://d"];
        for (args, says) in [
            (
                &["--pd-disaggregation", W[0], W[1]][..],
                "--pd-disaggregation: there are no prefill and decode workers; give --prefill URL and",
            ),
            (&["--pd-disaggregation"], "--pd-disaggregation: there are no prefill and decode workers; give"),
            (
                &["--prefill", "http://p"],
                "--prefill: http://p:80 is a prefill worker without any decode worker of its group and backend (no group, sglang); add one",
            ),
            (
                &["--decode", "http://d", "http://e"],
                "--decode: http://d:80 is a decode worker without any prefill worker",
            ),
            (
                &["--prefill", "8998", "--decode", "http://d"],
                "--prefill: the port 8998 has no address before it; write",
            ),
            (
                &["--prefill", "http://p", "1", "2", "--decode", "http://d"],
                "--prefill: \"2\" follows the port of http://p:80; one port",
            ),
            (
                &["--prefill", "http://p", "70000", "--decode", "http://d"],
                "--prefill: \"70000\" is no bootstrap port; give a port",
            ),
            (
                &[&pair[..], &["--worker-urls", "http://p"]].concat(),
                "--prefill: http://p:80 is given as regular and as prefill; one address has one role",
            ),
            (
                &[&pair[..], &["--connector", "mooncake"]].concat(),
                "--connector: only vLLM has connectors, and no worker is vLLM; add --backend vllm",
            ),
            (
                &[&pair[..], &["--prefill-policy", "cache_awre"]].concat(),
                "--prefill-policy: \"cache_awre\" is not known; did you mean cache_aware?",
            ),
        ] {
            let told = bad(args, &[], None);
            assert!(told.len() == 1 && told[0].starts_with(says), "{args:?}: {told:#?}");
        }
        let table = |more: &str| {
            format!("prefill = ['http://p']\ndecode = ['http://d']\n[[workers]]\nurl = 'http://x'\n{more}")
        };
        for (more, says) in [
            (
                "bootstrap_port = 1",
                "c.toml:5:18: bootstrap_port: is for prefill workers, and this one is regular; leave it out, or set role",
            ),
            (
                "role = 'decode'\nbootstrap_port = 1",
                "c.toml:6:18: bootstrap_port: is for prefill workers, and this one is decode;",
            ),
            (
                "role = 'prefill'\nbootstrap_port = 0",
                "c.toml:6:18: bootstrap_port: 0 is out of range; give \"none\", or a port from 1 to 65535",
            ),
            (
                "role = 'prefill'\nbootstrap_port = 'no'",
                "c.toml:6:18: bootstrap_port: is a text; give \"none\", or a port",
            ),
            ("role = 'prefil'", "c.toml:5:8: role: \"prefil\" is not known; did you mean prefill?"),
            ("group = 'a'", "c.toml:5:9: group: is for prefill and decode workers, and this one is regular;"),
            (
                "role = 'decode'\nconnector = 'nixl'",
                "c.toml:6:13: connector: is vLLM's, and this worker is SGLang; add backend = \"vllm\"",
            ),
            ("backend = 'vlm'", "c.toml:5:11: backend: \"vlm\" is not known; did you mean vllm?"),
            ("dp_size = 1025", "c.toml:5:11: dp_size: 1025 is out of range; give a whole number from 1 to 1024"),
            ("dp_size = 'x'", "c.toml:5:11: dp_size: is a text; give a whole number from 1 to 1024"),
            (
                "role = 'decode'\ngroup = 'a'",
                "c.toml:4:7: worker: http://x:80 is a decode worker without any prefill worker of its group and backend (group \"a\", sglang)",
            ),
            (
                "role = 'decode'\nbackend = 'vllm'",
                "c.toml:4:7: worker: http://x:80 is a decode worker without any prefill worker of its group and backend (no group, vllm_nixl)",
            ),
        ] {
            let told = bad(&[], &[], Some(&table(more)));
            assert!(told.len() == 1 && told[0].starts_with(says), "{more}: {told:#?}");
        }
        let ranks: String = (0..5).map(|i| format!("[[workers]]\nurl = 'http://x{i}'\ndp_size = 1024\n")).collect();
        let told = bad(&[], &[], Some(&ranks));
        assert!(told.len() == 1 && told[0].contains("5120 workers, ranks included, are more than"), "{told:#?}");
    }

    #[test]
    fn workers_by_hand_replace_all_of_the_file_and_say_so() {
        let file = "prefill = ['http://a']\ndecode = ['http://b']";
        let loaded = good(&["--prefill", "http://p", "--decode", "http://d"], &[], Some(file));
        assert_eq!(loaded.config.workers.iter().map(|w| &*w.url).collect::<Vec<_>>(), ["http://p:80", "http://d:80"]);
        let loaded = good(&W, &[], Some(file));
        assert_eq!(loaded.config.workers.len(), 1);
        let warned: Vec<String> = loaded.warnings.iter().map(Mistake::to_string).collect();
        assert_eq!(
            warned[0],
            "--worker-urls: replaces prefill of the file; give --prefill beside it if those workers are meant too"
        );
        assert!(!loaded.to_toml().contains("http://a"), "{}", loaded.to_toml());
    }

    #[test]
    fn times_and_leavings_of_pairs_are_read() {
        let c = good(&W, &[], None).config;
        let times = |c: &Config| [c.prefill_first_byte_timeout, c.decode_first_byte_timeout, c.stall_timeout];
        assert_eq!(times(&c), [Duration::ZERO; 3]);
        assert_eq!((c.sglang_client_leaves, c.vllm_client_leaves), (ClientLeaves::Close, ClientLeaves::FinishPrefill));
        let file = "prefill_first_byte_timeout_secs = 1\ndecode_first_byte_timeout_secs = 2.5\nstall_timeout_secs = 3\n\
                    sglang_client_leaves = 'finish_prefill'\nvllm_client_leaves = 'close'";
        let c = good(&W, &[], Some(file)).config;
        assert_eq!(times(&c), [1000, 2500, 3000].map(Duration::from_millis));
        assert_eq!((c.sglang_client_leaves, c.vllm_client_leaves), (ClientLeaves::FinishPrefill, ClientLeaves::Close));
        assert!(
            good(&["--prefill", "http://p", "1", "--decode", "http://d", "--backend", "vllm"], &[], None).warnings[0]
                .to_string()
                .contains("which NIXL does not use")
        );
    }

    #[test]
    fn keys_of_clients_come_from_all_sources_and_are_never_shown() {
        let keys = |args: &[&str], env: &[(&str, &str)], file| {
            let loaded = good(&[&W[..], args].concat(), env, file);
            let printed = loaded.to_toml();
            assert!(!printed.contains("sk-") && printed.contains("# api_key is set, and not shown"), "{printed}");
            assert!(!format!("{:?}", loaded.config).contains("sk-"));
            loaded.config.api_keys
        };
        let are = |keys: Vec<Secret>, wanted: &[&str]| {
            assert_eq!(keys.len(), wanted.len());
            assert!(keys.iter().zip(wanted).all(|(key, wanted)| key.is(wanted.as_bytes())), "{wanted:?}");
        };
        are(keys(&["--api-key", "sk-a", "sk-b", "--api-key=sk-,c"], &[], None), &["sk-a", "sk-b", "sk-,c"]);
        are(keys(&[], &[("CORELANE_API_KEY", "sk-a, sk-b")], None), &["sk-a", "sk-b"]);
        are(keys(&[], &[], Some("api_key = 'sk-,a'")), &["sk-,a"]);
        are(keys(&[], &[], Some("api_key = ['sk-a', 'sk-b,']")), &["sk-a", "sk-b,"]);
        are(keys(&["--api-key", "sk-a"], &[("CORELANE_API_KEY", "sk-b")], Some("api_key = 'sk-c'")), &["sk-a"]);
        assert!(good(&W, &[], None).to_toml().contains("# api_key is not set"));
        for (args, env, file, says) in [
            (&["--api-key="][..], &[][..], None, "--api-key: a secret is empty; give it,"),
            (&["--api-key", "sk-a b"], &[], None, "--api-key: a secret has characters other than visible ASCII,"),
            (&[], &[("CORELANE_API_KEY", " , ")], None, "CORELANE_API_KEY: a secret is empty;"),
            (&[], &[], Some("api_key = []"), "c.toml:1:11: api_key: is an empty list; give at least one secret"),
            (&[], &[], Some("api_key = ['sk-a', 'sk-\u{e9}']"), "c.toml:1:20: api_key: a secret has characters"),
            (&[], &[], Some("api_key = 7"), "c.toml:1:11: api_key: is a whole number; give at least one secret"),
        ] {
            let told = bad(&[&W[..], args].concat(), env, file);
            assert!(told.len() == 1 && told[0].starts_with(says) && !told[0].contains("sk-"), "{told:#?}");
        }
    }

    #[test]
    fn an_admin_listener_for_everybody_has_to_be_meant() {
        for (args, env, good) in [
            (&["--prometheus-host", "0.0.0.0"][..], &[][..], false),
            (&["--prometheus-host", "10.0.0.1"], &[], false),
            (&["--prometheus-host", "::ffff:127.0.0.1"], &[], true),
            (&["--prometheus-host", "0.0.0.0"], &[("CORELANE_ADMIN_TOKEN", "s3")], true),
            (&["--prometheus-host", "::", "--admin-open"], &[], true),
        ] {
            let told = try_load(&[&W[..], args].concat(), env, None).err().unwrap_or_default();
            let says = |m: &String| m.starts_with("--prometheus-host: whoever reaches") && m.contains("--admin-token");
            assert!(told.is_empty() == good && told.iter().all(says), "{args:?} {told:#?}");
        }
    }

    #[test]
    fn probes_and_labels_of_single_workers_are_read_and_printed() {
        let file = "[[workers]]\nurl = 'http://a'\nhealth_interval_secs = 2.5\nhealth_failure_threshold = 7\n\
                    health_success_threshold = 1\nlabels = { rack = '7', 'a b' = 'x\"y' }";
        let loaded = good(&[], &[], Some(file));
        let check = |worker: &WorkerSpec| {
            assert_eq!(worker.health_interval, Some(Duration::from_millis(2500)));
            assert_eq!((worker.health_failures, worker.health_successes), (Some(7), Some(1)));
            let labels: Vec<(&str, &str)> = worker.labels.iter().map(|(k, v)| (k.as_str(), v.as_str())).collect();
            assert_eq!(labels, [("a b", "x\"y"), ("rack", "7")]);
        };
        check(&loaded.config.workers[0]);
        check(&good(&[], &[], Some(&loaded.to_toml())).config.workers[0]);
        for (line, says) in [
            ("labels = 7", "labels: is no table;"),
            ("labels = { a = 7 }", "labels: \"a\" is no text;"),
            ("health_failure_threshold = 0", "health_failure_threshold: 0 is out of range; give a whole number from 1"),
            ("health_interval_secs = 0", "health_interval_secs: 0 is out of range; give seconds from 0.1"),
        ] {
            let told = bad(&[], &[], Some(&format!("[[workers]]\nurl = 'http://a'\n{line}")));
            assert!(told.len() == 1 && told[0].contains(says), "{line}: {told:#?}");
        }
    }

    #[test]
    fn limits_go_by_the_peers_names() {
        let flags = ["--max-concurrent-requests", "256", "--queue-size", "0", "--queue-timeout-secs", "1.5"];
        let config = good(&[&W[..], &flags].concat(), &[("CORELANE_MAX_REQUESTS_PER_WORKER", "8")], None).config;
        assert_eq!((config.max_concurrent_requests, config.queue_size), (256, 0));
        assert_eq!((config.queue_timeout, config.max_requests_per_worker), (Duration::from_millis(1500), 8));
    }

    /// A value that is not the default.
    fn sample(row: &Row) -> String {
        match row.kind {
            Kind::Address(_) => "::1".into(),
            Kind::Whole { min, .. } => (min + 6).to_string(),
            Kind::Micros { min, .. } | Kind::Millis { min, .. } => (min + 1).to_string(),
            Kind::Seconds { min, .. } => (min + 0.5).to_string(),
            Kind::Ratio { max, .. } => (max / 2.0).to_string(),
            Kind::Bytes { max, .. } => if max < 1 << 30 { "128KiB" } else { "3GiB" }.into(),
            Kind::Switch(_) => "true".into(),
            Kind::Choice { names, set: _ } if row.default == names[1] => names[0].into(),
            Kind::Choice { names, .. } | Kind::ChoiceOrNone { names, .. } => names[1].into(),
            Kind::Cores(_) => "2,0-1".into(),
            Kind::Core(_) => "3".into(),
            Kind::HeaderNames(_) => "x-id,x-other".into(),
            Kind::Statuses(_) => "429,503".into(),
            Kind::Target(_) => "/ping?x=1".into(),
            Kind::Levels(_) => "warn,corelane=debug".into(),
            Kind::Name(_) => "llama \"3\"".into(),
            Kind::Secret(_) | Kind::Secrets(_) => "s3".into(),
            Kind::Workers(Role::Prefill) => "http://a:1 8998".into(),
            Kind::Workers(_) => "http://a:1".into(),
        }
    }
}
