//! What a check has to say: how bad it is, what was seen, what to do.
//!
//! Takes findings, gives text, JSON and the exit code. Never looks at a host.

use std::fmt::Write as _;

use serde_json::json;

/// How bad a finding is, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// As it should be.
    Ok,
    /// Worth knowing; nothing has to be done.
    Note,
    /// It will serve, but less well than this host could, or not as configured.
    Warning,
    /// It will not start, or some requests will fail.
    Fail,
}

impl Level {
    const ALL: [Level; 4] = [Level::Fail, Level::Warning, Level::Note, Level::Ok];

    const fn name(self) -> &'static str {
        match self {
            Level::Ok => "ok",
            Level::Note => "note",
            Level::Warning => "warning",
            Level::Fail => "fail",
        }
    }
}

/// One thing that was looked at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    pub level: Level,
    /// Group and subject: `limits.files`. Stable, for scripts.
    pub check: &'static str,
    /// What was seen, and what it means.
    pub seen: String,
    /// What to do about it, where a line can be pasted: the line.
    pub fix: Option<String>,
}

impl Finding {
    pub fn new(level: Level, check: &'static str, seen: impl Into<String>) -> Finding {
        Finding { level, check, seen: seen.into(), fix: None }
    }

    pub fn ok(check: &'static str, seen: impl Into<String>) -> Finding {
        Finding::new(Level::Ok, check, seen)
    }

    pub fn note(check: &'static str, seen: impl Into<String>) -> Finding {
        Finding::new(Level::Note, check, seen)
    }

    pub fn warning(check: &'static str, seen: impl Into<String>) -> Finding {
        Finding::new(Level::Warning, check, seen)
    }

    pub fn fail(check: &'static str, seen: impl Into<String>) -> Finding {
        Finding::new(Level::Fail, check, seen)
    }

    /// Adds what to do.
    pub fn fix(mut self, fix: impl Into<String>) -> Finding {
        self.fix = Some(fix.into());
        self
    }
}

fn count(findings: &[Finding], level: Level) -> usize {
    findings.iter().filter(|f| f.level == level).count()
}

/// 0: nothing fails (and, if `strict`, nothing warns); 1: warnings, if `strict`; 2: failures.
pub fn exit_code(findings: &[Finding], strict: bool) -> u8 {
    match findings.iter().map(|f| f.level).max() {
        Some(Level::Fail) => 2,
        Some(Level::Warning) if strict => 1,
        _ => 0,
    }
}

/// A line for each finding, what to do below it, and a line that counts them.
pub fn text(findings: &[Finding]) -> String {
    let width = findings.iter().map(|f| f.check.len()).max().unwrap_or(0);
    let mut out = String::new();
    for Finding { level, check, seen, fix } in findings {
        let _ = writeln!(out, "{:<8} {check:<width$}  {seen}", level.name());
        if let Some(fix) = fix {
            let _ = writeln!(out, "{:<8} {:<width$}  → {fix}", "", "");
        }
    }
    let counts: Vec<String> = Level::ALL.map(|level| format!("{} {}", count(findings, level), level.name())).into();
    let _ = writeln!(out, "{}", counts.join(", "));
    out
}

/// The same for scripts.
pub fn json(findings: &[Finding], exit: u8) -> String {
    let row = |f: &Finding| json!({"check": f.check, "level": f.level.name(), "seen": f.seen, "fix": f.fix});
    let counts: serde_json::Map<String, serde_json::Value> =
        Level::ALL.map(|level| (level.name().to_owned(), count(findings, level).into())).into_iter().collect();
    let all = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "exit": exit,
        "counts": counts,
        "findings": findings.iter().map(row).collect::<Vec<_>>(),
    });
    format!("{all:#}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_decides() {
        let of = |levels: &[Level]| levels.iter().map(|l| Finding::new(*l, "a.b", "c")).collect::<Vec<_>>();
        for (levels, lenient, strict) in [
            (&[][..], 0, 0),
            (&[Level::Ok, Level::Note], 0, 0),
            (&[Level::Warning, Level::Ok], 0, 1),
            (&[Level::Fail, Level::Warning], 2, 2),
        ] {
            let findings = of(levels);
            assert_eq!((exit_code(&findings, false), exit_code(&findings, true)), (lenient, strict), "{levels:?}");
        }
    }

    #[test]
    fn both_forms_say_the_same() {
        let findings = [Finding::ok("a.b", "fine"), Finding::warning("limits.files", "few").fix("ulimit -n 9")];
        let text = text(&findings);
        assert_eq!(
            text,
            "ok       a.b           fine\nwarning  limits.files  few\n                       → ulimit -n 9\n\
             0 fail, 1 warning, 0 note, 1 ok\n"
        );
        let said: serde_json::Value = serde_json::from_str(&json(&findings, 1)).unwrap();
        assert_eq!((&said["exit"], &said["counts"]["warning"]), (&1.into(), &1.into()));
        assert_eq!(said["findings"][1]["fix"], "ulimit -n 9");
        assert!(said["findings"][0]["fix"].is_null());
    }
}
