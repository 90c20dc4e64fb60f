//! Options from environment variables.
//!
//! Takes the variables that begin with `CORELANE_`, gives raw options. Never takes an empty variable for set.

use super::given::Given;
use super::mistakes::{Mistake, Origin, Wrong, nearest};
use super::options::{ENV_PREFIX, OPTIONS, later};

/// Names and values of variables; `None` for a value that is not UTF-8.
pub type Environment = Vec<(String, Option<String>)>;

/// The variable that names the configuration file.
pub const CONFIG_VARIABLE: &str = "CORELANE_CONFIG";

/// What the process was started with.
pub fn of_process() -> Environment {
    let ours = |(name, value): (std::ffi::OsString, std::ffi::OsString)| {
        let name = name.into_string().ok().filter(|name| name.starts_with(ENV_PREFIX))?;
        Some((name, value.into_string().ok()))
    };
    let mut found: Environment = std::env::vars_os().filter_map(ours).collect();
    found.sort();
    found
}

/// What the environment says.
#[derive(Default)]
pub struct FromEnvironment {
    pub config_file: Option<String>,
    pub given: Vec<Given>,
    pub mistakes: Vec<Mistake>,
    /// Unknown variables: a warning, because orchestrators inject variables of their own.
    pub warnings: Vec<Mistake>,
}

/// Sorts the variables by option.
pub fn read(environment: &[(String, Option<String>)]) -> FromEnvironment {
    let mut out = FromEnvironment::default();
    for (name, value) in environment {
        let Some(key) = name.strip_prefix(ENV_PREFIX) else { continue };
        let origin = Origin::Env(name.clone());
        match value {
            None => out.mistakes.push(Mistake::new(origin, "the value is not UTF-8", "correct or unset it")),
            Some(value) if value.is_empty() => {}
            Some(value) if name == CONFIG_VARIABLE => out.config_file = Some(value.clone()),
            Some(value) => read_one(&mut out, origin, &key.to_ascii_lowercase(), name, value),
        }
    }
    out
}

fn read_one(out: &mut FromEnvironment, origin: Origin, key: &str, name: &str, value: &str) {
    if let Some(row) = OPTIONS.iter().find(|row| row.env() == name) {
        // Kubernetes sets SERVICE_PORT=tcp://address:port for every service that a pod can see.
        if row.key == "port" && value.starts_with("tcp://") {
            let fix = "set enableServiceLinks: false on the pod, or give --port";
            let wrong = Wrong::new("holds the address of a Kubernetes service named corelane", fix);
            out.mistakes.push(wrong.at(&origin, row.key));
            return;
        }
        out.given.push(Given::new(row, origin, vec![value.to_owned()]));
        return;
    }
    if let Some(what) = later(key) {
        out.mistakes.push(Mistake::new(origin, format!("not supported yet ({what})"), "unset it"));
        return;
    }
    let names: Vec<String> = OPTIONS.iter().map(|row| row.env()).collect();
    let fix = match nearest(name, names.iter().map(String::as_str).chain([CONFIG_VARIABLE])) {
        Some(near) => format!("did you mean {near}?"),
        None => "it is ignored".to_owned(),
    };
    out.warnings.push(Mistake::new(origin, "no option has this name", fix));
}
