//! The types of options: how a text becomes a setting.
//!
//! Takes raw texts, gives changes to a [`Config`] and each value's spelling in TOML. Never knows which option it
//! reads or where the text came from.

use std::fmt::Write as _;
use std::net::IpAddr;
use std::time::Duration;

use super::mistakes::{Wrong, nearest, quote};
use super::{Config, Role, Secret, workers};
use crate::limits::MAX_LANES;

/// The type of an option, with its range and the place it is written to.
#[derive(Clone, Copy)]
pub enum Kind {
    /// An IP address.
    Address(fn(&mut Config, IpAddr)),
    /// A whole number.
    Whole { min: u64, max: u64, set: fn(&mut Config, u64) },
    /// A whole number of microseconds.
    Micros { min: u64, max: u64, set: fn(&mut Config, Duration) },
    /// A whole number of milliseconds.
    Millis { min: u64, max: u64, set: fn(&mut Config, Duration) },
    /// Seconds, with or without a fraction.
    Seconds { min: f64, max: f64, set: fn(&mut Config, Duration) },
    /// A number of bytes, with or without a unit.
    Bytes { min: u64, max: u64, set: fn(&mut Config, u64) },
    /// On or off; as a flag alone it means on.
    Switch(fn(&mut Config, bool)),
    /// One of a closed set.
    Choice { names: &'static [&'static str], set: fn(&mut Config, usize) },
    /// One of a closed set, or nothing.
    ChoiceOrNone { names: &'static [&'static str], set: fn(&mut Config, Option<usize>) },
    /// `auto` (empty) or a list of cores.
    Cores(fn(&mut Config, Vec<usize>)),
    /// `auto` (`None`) or one core.
    Core(fn(&mut Config, Option<usize>)),
    /// Names of HTTP headers, lower case.
    HeaderNames(fn(&mut Config, Vec<String>)),
    /// Statuses of answers, or `none`.
    Statuses(fn(&mut Config, Vec<u16>)),
    /// A path, with or without a query.
    Target(fn(&mut Config, String)),
    /// What is logged: a level, or levels by target.
    Levels(fn(&mut Config, String)),
    /// A number that has no unit.
    Ratio { min: f64, max: f64, set: fn(&mut Config, f64) },
    /// A secret, or nothing; never shown.
    Secret(fn(&mut Config, Option<Secret>)),
    /// Secrets, none to any number; never shown.
    Secrets(fn(&mut Config, Vec<Secret>)),
    /// A name, or nothing.
    Name(fn(&mut Config, Option<String>)),
    /// Addresses of workers of a role; `workers` joins them with the `[[workers]]` tables.
    Workers(Role),
}

/// Highest core number that can be pinned to: a `cpu_set_t` holds 1024 bits.
pub const MAX_CORE: usize = 1023;

const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// Headers that mean something else already and cannot carry a request's id.
const NOT_IDS: [&str; 8] =
    ["authorization", "connection", "content-length", "content-type", "cookie", "host", "te", "transfer-encoding"];

impl Kind {
    /// Whether several values are meant.
    pub const fn is_list(&self) -> bool {
        matches!(self, Kind::HeaderNames(_) | Kind::Statuses(_) | Kind::Workers(_) | Kind::Secrets(_))
    }

    /// What a value looks like, range included: completes "give …".
    pub fn wants(&self) -> String {
        match self {
            Kind::Address(_) => "an IP address such as 127.0.0.1, 0.0.0.0 or ::".into(),
            Kind::Whole { min, max, .. } => format!("a whole number from {min} to {max}"),
            Kind::Micros { min, max, .. } => format!("whole microseconds from {min} to {max}"),
            Kind::Millis { min, max, .. } => format!("whole milliseconds from {min} to {max}"),
            Kind::Seconds { min, max, .. } => format!("seconds from {min} to {max}"),
            Kind::Bytes { min, max, .. } => {
                format!("a size from {} to {}, in bytes or with KiB, MiB, GiB", size(*min), size(*max))
            }
            Kind::Switch(_) => "true or false".into(),
            Kind::Choice { names, .. } | Kind::ChoiceOrNone { names, .. } => format!("one of {}", names.join(", ")),
            Kind::Cores(_) => "auto, or cores such as 0-3,6".into(),
            Kind::Core(_) => "auto, or the number of one core".into(),
            Kind::HeaderNames(_) => "names of headers".into(),
            Kind::Statuses(_) => "statuses from 400 to 599, or none".into(),
            Kind::Target(_) => "a path that starts with /".into(),
            Kind::Levels(_) => format!("one of {}, or target=level pairs", LEVELS.join(", ")),
            Kind::Ratio { min, max, .. } => format!("a number from {min} to {max}"),
            Kind::Secret(_) => "a secret".into(),
            Kind::Secrets(_) => "at least one secret".into(),
            Kind::Name(_) => "a name".into(),
            Kind::Workers(Role::Prefill) => {
                "addresses with bootstrap ports, such as \"http://10.0.0.1:30000 8998\"".into()
            }
            Kind::Workers(_) => "addresses such as http://10.0.0.1:30000".into(),
        }
    }

    /// The range or the choices, short; `None` where the placeholder says enough.
    pub fn range(&self) -> Option<String> {
        match self {
            Kind::Whole { min, max, .. } => Some(format!("{min} to {max}")),
            Kind::Micros { min, max, .. } => Some(format!("{min} to {max} µs")),
            Kind::Millis { min, max, .. } => Some(format!("{min} to {max} ms")),
            Kind::Seconds { min, max, .. } => Some(format!("{min} to {max} s")),
            Kind::Bytes { min, max, .. } => Some(format!("{} to {}", size(*min), size(*max))),
            Kind::Ratio { min, max, .. } => Some(format!("{min} to {max}")),
            Kind::Choice { names, .. } | Kind::ChoiceOrNone { names, .. } => Some(names.join(", ")),
            Kind::Levels(_) => Some(format!("{}; or target=level,…", LEVELS.join(", "))),
            Kind::Cores(_) | Kind::Core(_) => Some(self.wants()),
            Kind::Address(_)
            | Kind::Switch(_)
            | Kind::HeaderNames(_)
            | Kind::Statuses(_)
            | Kind::Target(_)
            | Kind::Name(_)
            | Kind::Secret(_)
            | Kind::Secrets(_)
            | Kind::Workers(_) => None,
        }
    }

    /// The placeholder of the value in help.
    pub const fn placeholder(&self) -> &'static str {
        match self {
            Kind::Address(_) => "ADDRESS",
            Kind::Whole { .. } => "N",
            Kind::Micros { .. } => "US",
            Kind::Millis { .. } => "MS",
            Kind::Seconds { .. } => "SECS",
            Kind::Bytes { .. } => "SIZE",
            Kind::Switch(_) => "BOOL",
            Kind::Choice { .. } | Kind::ChoiceOrNone { .. } => "NAME",
            Kind::Cores(_) => "CORES",
            Kind::Core(_) => "CORE",
            Kind::HeaderNames(_) => "HEADER",
            Kind::Statuses(_) => "STATUS",
            Kind::Target(_) => "PATH",
            Kind::Levels(_) => "LEVEL",
            Kind::Name(_) => "NAME",
            Kind::Ratio { .. } => "X",
            Kind::Secret(_) | Kind::Secrets(_) => "SECRET",
            Kind::Workers(Role::Prefill) => "URL [PORT|none]",
            Kind::Workers(_) => "URL",
        }
    }

    /// The unit of the value, where it has one.
    pub const fn unit(&self) -> Option<&'static str> {
        match self {
            Kind::Micros { .. } => Some("µs"),
            Kind::Millis { .. } => Some("ms"),
            Kind::Seconds { .. } => Some("s"),
            Kind::Bytes { .. } => Some("bytes"),
            _ => None,
        }
    }

    /// Reads `texts` (one, or the items of a list) and writes the setting into `config`. Gives the value in TOML's
    /// spelling, `None` for one that is not set.
    ///
    /// # Errors
    /// One per bad text, with the text's place in `texts`.
    pub fn put(&self, config: &mut Config, texts: &[String]) -> Result<Option<String>, Vec<(usize, Wrong)>> {
        match self {
            Kind::Statuses(set) => {
                let is_none = matches!(texts, [only] if only.trim() == "none");
                let statuses = if is_none { Vec::new() } else { each(texts, status)? };
                let shown = match is_none {
                    true => toml_list(texts),
                    false => format!("{statuses:?}"),
                };
                set(config, statuses);
                Ok(Some(shown))
            }
            Kind::HeaderNames(set) => {
                let names = each(texts, header_name)?;
                if let Some(at) = (1..names.len()).find(|i| names[..*i].contains(&names[*i])) {
                    return Err(vec![(
                        at,
                        Wrong::new(format!("{} is named twice", quote(&names[at])), "name it once"),
                    )]);
                }
                if names.is_empty() {
                    return Err(vec![(
                        0,
                        Wrong::new("the list is empty", "name at least one header, or leave it out"),
                    )]);
                }
                let shown = toml_list(&names);
                set(config, names);
                Ok(Some(shown))
            }
            Kind::Workers(role) => {
                let workers = each(texts, |text| workers::Address::parse(*role, text).map(|given| given.to_string()))?;
                Ok(Some(toml_list(&workers)))
            }
            Kind::Secrets(set) => {
                let secrets = each(texts, visible)?;
                let shown = (!secrets.is_empty()).then(|| toml_text("(hidden)"));
                set(config, secrets);
                Ok(shown)
            }
            _ => {
                let [text] = texts else {
                    let what = format!("has {} values, and takes one", texts.len());
                    return Err(vec![(texts.len().saturating_sub(1), Wrong::new(what, "leave one"))]);
                };
                self.put_one(config, text.trim()).map_err(|wrong| vec![(0, wrong)])
            }
        }
    }

    fn put_one(&self, config: &mut Config, text: &str) -> Result<Option<String>, Wrong> {
        let give = || format!("give {}", self.wants());
        if text.is_empty() {
            return match self {
                Kind::Name(set) => {
                    set(config, None);
                    Ok(None)
                }
                Kind::Secret(set) => {
                    set(config, None);
                    Ok(None)
                }
                Kind::ChoiceOrNone { set, .. } => {
                    set(config, None);
                    Ok(None)
                }
                _ => Err(Wrong::new("the value is empty", give())),
            };
        }
        let shown = match self {
            Kind::Address(set) => {
                let bare = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')).unwrap_or(text);
                let ip: IpAddr = bare.parse().map_err(|_| not(text, "an IP address", give()))?;
                set(config, ip);
                toml_text(&ip.to_string())
            }
            Kind::Whole { min, max, set } => {
                let n = whole(text, *min, *max).map_err(|what| Wrong::new(what, give()))?;
                set(config, n);
                n.to_string()
            }
            Kind::Micros { min, max, set } => {
                let n = whole(text, *min, *max).map_err(|what| Wrong::new(what, give()))?;
                set(config, Duration::from_micros(n));
                n.to_string()
            }
            Kind::Millis { min, max, set } => {
                let n = whole(text, *min, *max).map_err(|what| Wrong::new(what, give()))?;
                set(config, Duration::from_millis(n));
                n.to_string()
            }
            Kind::Seconds { min, max, set } => {
                let secs = seconds(text).ok_or_else(|| not(text, "a number of seconds", give()))?;
                if !(*min..=*max).contains(&secs) {
                    return Err(Wrong::new(format!("{} is out of range", quote(text)), give()));
                }
                set(config, Duration::from_secs_f64(secs));
                secs.to_string()
            }
            Kind::Ratio { min, max, set } => {
                let ratio = seconds(text).ok_or_else(|| not(text, "a number", give()))?;
                if !(*min..=*max).contains(&ratio) {
                    return Err(Wrong::new(format!("{} is out of range", quote(text)), give()));
                }
                set(config, ratio);
                ratio.to_string()
            }
            Kind::Bytes { min, max, set } => {
                let n = parse_size(text).map_err(|fix| not(text, "a size", fix.unwrap_or_else(give)))?;
                if !(*min..=*max).contains(&n) {
                    return Err(Wrong::new(format!("{} is out of range", quote(text)), give()));
                }
                set(config, n);
                toml_size(n)
            }
            Kind::Switch(set) => {
                let on = match text {
                    "true" | "1" => true,
                    "false" | "0" => false,
                    _ => return Err(not(text, "true or false", give())),
                };
                set(config, on);
                on.to_string()
            }
            Kind::Choice { names, set } => {
                let at = choice(text, names)?;
                set(config, at);
                toml_text(names[at])
            }
            Kind::ChoiceOrNone { names, set } => {
                let at = choice(text, names)?;
                set(config, Some(at));
                toml_text(names[at])
            }
            Kind::Cores(set) if text == "auto" => {
                set(config, Vec::new());
                toml_text(text)
            }
            Kind::Cores(set) => {
                let cores = parse_cores(text).map_err(|what| Wrong::new(what, give()))?;
                let shown = toml_text(&cores.iter().map(usize::to_string).collect::<Vec<_>>().join(","));
                set(config, cores);
                shown
            }
            Kind::Core(set) if text == "auto" => {
                set(config, None);
                toml_text(text)
            }
            Kind::Core(set) => {
                let core = whole(text, 0, MAX_CORE as u64).map_err(|what| Wrong::new(what, give()))?;
                set(config, Some(core as usize));
                core.to_string()
            }
            Kind::Target(set) => {
                set(config, target(text)?.to_owned());
                toml_text(text)
            }
            Kind::Levels(set) => {
                let levels = levels(text).ok_or_else(|| not(text, "a log level", give()))?;
                let shown = toml_text(&levels);
                set(config, levels);
                shown
            }
            Kind::Secret(set) => {
                set(config, Some(Secret::new(text)));
                toml_text("(hidden)")
            }
            Kind::Name(set) => {
                if text.chars().any(char::is_control) {
                    return Err(Wrong::new(format!("{} has control characters", quote(text)), "leave them out"));
                }
                set(config, Some(text.to_owned()));
                toml_text(text)
            }
            Kind::HeaderNames(_) | Kind::Statuses(_) | Kind::Workers(_) | Kind::Secrets(_) => {
                unreachable!("lists are read by put")
            }
        };
        Ok(Some(shown))
    }
}

/// A path that can be asked for, with or without a query.
///
/// # Errors
/// That it is none.
pub fn target(text: &str) -> Result<&str, Wrong> {
    if !text.starts_with('/') || text.contains('#') || !text.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(not(text, "a path", "give a path that starts with /"));
    }
    Ok(text)
}

fn not(text: &str, what: &str, fix: impl Into<String>) -> Wrong {
    Wrong::new(format!("{} is not {what}", quote(text)), fix)
}

fn status(text: &str) -> Result<u16, Wrong> {
    let status = text.parse().ok().filter(|status| (400..600).contains(status));
    status.ok_or_else(|| {
        Wrong::new(format!("{} is no status of an error", quote(text)), "give statuses from 400 to 599, or none alone")
    })
}

fn each<T>(texts: &[String], read: impl Fn(&str) -> Result<T, Wrong>) -> Result<Vec<T>, Vec<(usize, Wrong)>> {
    let mut good = Vec::new();
    let mut bad = Vec::new();
    for (at, text) in texts.iter().enumerate() {
        match read(text.trim()) {
            Ok(value) => good.push(value),
            Err(wrong) => bad.push((at, wrong)),
        }
    }
    if bad.is_empty() { Ok(good) } else { Err(bad) }
}

/// Place of a name among the names of a closed set.
///
/// # Errors
/// That it is not there, with the name that was probably meant.
pub fn choice(text: &str, names: &[&str]) -> Result<usize, Wrong> {
    if let Some(at) = names.iter().position(|name| *name == text) {
        return Ok(at);
    }
    let give = format!("give one of {}", names.join(", "));
    let fix = match nearest(text, names.iter().copied()) {
        Some(near) => format!("did you mean {near}? {give}"),
        None => give,
    };
    Err(Wrong::new(format!("{} is not known", quote(text)), fix))
}

/// Plain ASCII digits as a number; no sign, no spaces.
pub fn digits(text: &str) -> Option<u64> {
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    text.parse().ok()
}

fn whole(text: &str, min: u64, max: u64) -> Result<u64, String> {
    let number = text.strip_prefix('-').unwrap_or(text);
    if number.is_empty() || !number.bytes().all(|b| b.is_ascii_digit()) {
        return Err(format!("{} is not a whole number", quote(text)));
    }
    match digits(text) {
        Some(n) if (min..=max).contains(&n) => Ok(n),
        _ => Err(format!("{} is out of range", quote(text))),
    }
}

fn seconds(text: &str) -> Option<f64> {
    let plain = text.bytes().all(|b| b.is_ascii_digit() || b == b'.' || b == b'-');
    // Adding zero takes the sign off a zero, which TOML writes without one.
    text.parse::<f64>().ok().filter(|secs| plain && secs.is_finite()).map(|secs| secs + 0.0)
}

const UNITS: [(&str, u64); 4] = [("gib", 1 << 30), ("mib", 1 << 20), ("kib", 1 << 10), ("b", 1)];

/// Reads `1048576`, `512MiB` or `4 GiB`.
///
/// # Errors
/// The text to write instead, where it can be guessed (`512MB` → `512MiB`).
fn parse_size(text: &str) -> Result<u64, Option<String>> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = (&text[..end], text[end..].trim().to_ascii_lowercase());
    let number = digits(number).ok_or(None)?;
    if unit.is_empty() {
        return Ok(number);
    }
    if let Some((_, factor)) = UNITS.iter().find(|(name, _)| *name == unit) {
        return number.checked_mul(*factor).ok_or(None);
    }
    let guess = match unit.as_str() {
        "k" | "kb" => "KiB",
        "m" | "mb" => "MiB",
        "g" | "gb" => "GiB",
        _ => return Err(None),
    };
    Err(Some(format!("units count in powers of 1024: write {number}{guess}")))
}

/// A size in the largest unit that leaves a whole number.
pub fn size(bytes: u64) -> String {
    for (name, unit) in [("GiB", 1u64 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)] {
        if bytes >= unit && bytes.is_multiple_of(unit) {
            return format!("{}{name}", bytes / unit);
        }
    }
    bytes.to_string()
}

fn toml_size(bytes: u64) -> String {
    let text = size(bytes);
    if text.bytes().all(|b| b.is_ascii_digit()) { text } else { toml_text(&text) }
}

/// A text as a TOML string.
pub fn toml_text(text: &str) -> String {
    toml_edit::Value::from(text).to_string().trim().to_owned()
}

/// Texts as a TOML array.
pub fn toml_list(texts: &[String]) -> String {
    let mut out = String::from("[");
    for (i, text) in texts.iter().enumerate() {
        let comma = if i == 0 { "" } else { ", " };
        let _ = write!(out, "{comma}{}", toml_text(text));
    }
    out.push(']');
    out
}

/// A secret that can stand in a header. What is wrong with one is told without showing it.
fn visible(text: &str) -> Result<Secret, Wrong> {
    if text.is_empty() {
        return Err(Wrong::new("a secret is empty", "give it, or leave the option out"));
    }
    if !text.bytes().all(|b| b.is_ascii_graphic()) {
        let what = "a secret has characters other than visible ASCII, which no header can bring";
        return Err(Wrong::new(what, "leave out spaces and line ends"));
    }
    Ok(Secret::new(text))
}

fn header_name(text: &str) -> Result<String, Wrong> {
    let token = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
    if text.is_empty() || !text.bytes().all(token) {
        return Err(not(text, "a header name", "give names such as x-request-id"));
    }
    let name = text.to_ascii_lowercase();
    if NOT_IDS.contains(&name.as_str()) || name.starts_with("proxy-") {
        return Err(Wrong::new(format!("{} has another meaning in HTTP", quote(text)), "choose another header"));
    }
    Ok(name)
}

/// Levels in lower case: `info`, or `info,corelane::lane=debug`.
fn levels(text: &str) -> Option<String> {
    let mut out = Vec::new();
    for part in text.split(',') {
        let part = part.trim();
        let (target, level) = part.rsplit_once('=').map_or((None, part), |(t, l)| (Some(t), l));
        let level = level.to_ascii_lowercase();
        let level = if level == "warning" { "warn" } else { LEVELS.iter().find(|l| **l == level)? };
        match target {
            None => out.push(level.to_owned()),
            Some(t) if !t.is_empty() && t.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b':') => {
                out.push(format!("{t}={level}"));
            }
            Some(_) => return None,
        }
    }
    Some(out.join(","))
}

/// Reads a list of cores such as `0-3,6`, in the order given. Whether the machine has them is not asked.
///
/// # Errors
/// What is wrong, as one line.
pub fn parse_cores(text: &str) -> Result<Vec<usize>, String> {
    let core = |t: &str| match digits(t.trim()) {
        Some(n) if n <= MAX_CORE as u64 => Ok(n as usize),
        Some(n) => Err(format!("core {n} is above {MAX_CORE}, the highest that can be pinned to")),
        None => Err(format!("{} is not a core number", quote(t.trim()))),
    };
    let mut cores: Vec<usize> = Vec::new();
    for part in text.split(',') {
        let (first, last) = match part.split_once('-') {
            Some((first, last)) => (core(first)?, core(last)?),
            None => {
                let one = core(part)?;
                (one, one)
            }
        };
        if first > last {
            return Err(format!("{} runs backwards", quote(part.trim())));
        }
        for n in first..=last {
            if cores.contains(&n) {
                return Err(format!("core {n} is listed twice"));
            }
            cores.push(n);
        }
    }
    if cores.len() > MAX_LANES {
        return Err(format!("{} cores are more than the {MAX_LANES} lanes of one process", cores.len()));
    }
    Ok(cores)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_keep_their_order() {
        assert_eq!(parse_cores("0-3,6"), Ok(vec![0, 1, 2, 3, 6]));
        assert_eq!(parse_cores("6, 2-3 ,0"), Ok(vec![6, 2, 3, 0]));
        assert_eq!(parse_cores("1023"), Ok(vec![1023]));
        assert_eq!(parse_cores("5-5"), Ok(vec![5]));
        assert_eq!(parse_cores("0-255").map(|c| c.len()), Ok(MAX_LANES));
    }

    #[test]
    fn bad_cores_are_refused() {
        for (given, says) in [
            ("", "not a core number"),
            ("a", "not a core number"),
            ("1,", "not a core number"),
            ("-1", "not a core number"),
            ("1-", "not a core number"),
            ("1-2-3", "not a core number"),
            ("+1", "not a core number"),
            ("3-1", "backwards"),
            ("0-3,2", "core 2 is listed twice"),
            ("1024", "above 1023"),
            ("0-99999999999999", "above 1023"),
            ("99999999999999999999999", "not a core number"),
            ("0-256", "lanes of one process"),
        ] {
            let wrong = parse_cores(given).expect_err(given);
            assert!(wrong.contains(says), "{given}: {wrong}");
        }
    }

    #[test]
    fn sizes_have_binary_units() {
        for (given, bytes) in [("0", 0), ("1048576", 1 << 20), ("512MiB", 512 << 20), ("4 gib", 4 << 30), ("7B", 7)] {
            assert_eq!(parse_size(given), Ok(bytes), "{given}");
        }
        for given in ["", "MiB", "-1", "1.5GiB", "1TiB", "99999999999999999999", "99999999999GiB"] {
            assert_eq!(parse_size(given), Err(None), "{given}");
        }
        assert!(parse_size("512MB").unwrap_err().unwrap().contains("512MiB"));
        for bytes in [1, 1023, 1024, 1 << 20, (1 << 20) + 1, 512 << 20, 1 << 40] {
            assert_eq!(parse_size(&size(bytes)), Ok(bytes));
        }
    }

    #[test]
    fn seconds_are_plain_decimals() {
        assert_eq!(seconds("1.5"), Some(1.5));
        assert!(seconds("-0").is_some_and(f64::is_sign_positive));
        for given in ["inf", "NaN", "1e3", "", "5s", "."] {
            assert_eq!(seconds(given), None, "{given}");
        }
    }

    #[test]
    fn log_levels_may_differ_by_target() {
        assert_eq!(levels("INFO").as_deref(), Some("info"));
        assert_eq!(levels("warning, corelane::lane=Debug").as_deref(), Some("warn,corelane::lane=debug"));
        for given in ["loud", "info,", "=info", "a b=info"] {
            assert_eq!(levels(given), None, "{given}");
        }
    }

    #[test]
    fn request_ids_do_not_ride_on_headers_of_http() {
        assert_eq!(header_name("X-Request-Id").as_deref(), Ok("x-request-id"));
        for given in ["", "a b", "x:y", "Host", "content-length", "Proxy-Authorization", "x\r\ny"] {
            assert!(header_name(given).is_err(), "{given}");
        }
    }
}
