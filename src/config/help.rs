//! Prose that derives from the option table: texts of `--help`, and the written reference `tuning/options.md`.
//!
//! Takes the table, gives text. Never says anything about an option that its row does not say.

use std::fmt::Write as _;

use super::options::{OPTIONS, Row, Section};
use super::values::Kind;

/// Columns of help.
pub const WIDTH: usize = 110;

/// What help says after the options.
pub const AFTER: &str = "\
Sizes are bytes, or have a unit: 65536, 64KiB, 512MiB, 4GiB. Seconds may have a fraction.

Every option is also an environment variable (CORELANE_MAX_PAYLOAD_SIZE; empty counts as unset) and a key of
the file (max_payload_size). A flag wins over a variable, a variable over the file, the file over the default.

Only in the file:
  [[workers]]       url, and optionally api_key (replaces the client's), models (else asked for), labels,
                    dp_size, health_endpoint, health_interval_secs and its like, backend (sglang, vllm),
                    role (regular, prefill, decode), and for the last two group, bootstrap_port and
                    connector (nixl, mooncake); expand = true: its host is a name that stands for a
                    worker at each of its addresses
  [[extra_routes]]  path (* stands for one segment) and methods, passed on to the workers

SIGHUP, or a change of the file, has it read again: what tuning/options.md calls live changes in the running process.

corelane check tells every mistake at once; corelane check --print shows what is in effect and why.";

/// The default with its unit, if there is a default.
fn default_with_unit(row: &Row) -> Option<String> {
    let shown = row.default.replace(',', ", ");
    match (row.default, row.kind.unit()) {
        ("", _) => None,
        (_, Some(unit @ ("s" | "ms"))) => Some(format!("{shown} {unit}")),
        _ => Some(shown),
    }
}

/// Help of one flag: what it does, then default and range on a line of their own.
pub fn flag_text(row: &Row) -> String {
    let prose = row.prose.replace('`', "");
    let default = match row.kind {
        Kind::Switch(_) => None,
        _ => default_with_unit(row).map(|default| format!("default: {default}")),
    };
    let facts: Vec<String> = default.into_iter().chain(row.kind.range()).collect();
    if facts.is_empty() { prose } else { format!("{prose}\n[{}]", facts.join("; ")) }
}

/// The option reference as Markdown.
pub fn reference() -> String {
    let mut out = String::from(INTRO);
    for section in Section::ALL {
        let _ = write!(
            out,
            "\n## {}\n\n| option | default | range | reload | meaning |\n|---|---|---|---|---|\n",
            section.title()
        );
        for row in OPTIONS.iter().filter(|row| row.section == *section) {
            let default = default_with_unit(row).map_or("–".to_owned(), |d| format!("`{d}`"));
            let range = row.kind.range().unwrap_or_default();
            let reload = if row.live { "live" } else { "restart" };
            let _ = writeln!(out, "| `{}` | {default} | {range} | {reload} | {} |", row.flag(), row.prose);
        }
    }
    out.push_str(TABLES);
    out
}

const INTRO: &str = "\
# Options

Generated from the option table in `src/config/options.rs`; after a change there: `CORELANE_BLESS=1 cargo test --test cli_check reference`.

Every option has three spellings: the flag `--max-payload-size`, the environment variable `CORELANE_MAX_PAYLOAD_SIZE`
and the key `max_payload_size` of the TOML file that `--config FILE` or `CORELANE_CONFIG` names.
A flag wins over a variable, a variable over the file, the file over the default. An empty variable counts as unset.

`corelane check --config FILE [flags]` tells every mistake at once and starts nothing;
`corelane check --print` shows the settings in effect and where each one came from.

SIGHUP, or a change of the file, has it read again under the same flags and variables. What is *live* changes in the running
process, the tables of the file too; what needs a *restart* is named in the log and stays as it is until then.
";

const TABLES: &str = r#"
## Tables of the file

Workers with a key, models or a role of their own; they add to `worker_urls` of the same file:

```toml
[[workers]]
url = "http://10.0.0.1:30000"
api_key = "sk-engine"          # replaces the client's Authorization
models = ["llama-3.1-8b"]      # left out: asked for at /v1/models
backend = "sglang"             # or "vllm"; left out: as the option backend says
role = "regular"
labels = { rack = "7" }        # shown in GET /workers, for whoever asks there
health_endpoint = "/ready"     # where it is probed; left out: see health_check_endpoint
health_interval_secs = 10      # these four left out: see health_check_interval_secs and so on
health_timeout_secs = 2
health_failure_threshold = 3
health_success_threshold = 2
dp_size = 8                    # each of the engine's ranks is chosen on its own; left out: see dp_aware

[[workers]]
url = "http://engines.example:30000"
expand = true                  # the host is a name: a worker at each of its addresses, as the name service has them
```

Prefill and decode workers can also be listed in `prefill` and `decode` of the same file
(`prefill = ["http://10.0.0.2:30000 8998", "http://10.0.0.3:30000"]`, as text with commas in the environment variable).
A table says more of them; workers are paired within a group and backend only:

```toml
[[workers]]
url = "http://10.0.0.2:30000"
role = "prefill"               # or "decode"
group = "rack-7"               # left out: the group of all that name none
backend = "vllm"
connector = "mooncake"         # vllm only: "nixl" or "mooncake"; left out: as the option connector says
bootstrap_port = 8998          # prefill only; "none" or left out: the engine's own default
```

Further paths that are passed on to any usable worker; `*` stands for one segment (not `.` or `..`, and without an encoded slash or a backslash), methods default to GET, HEAD and POST:

```toml
[[extra_routes]]
path = "/v1/adapters/*"
methods = ["GET"]
```
"#;
