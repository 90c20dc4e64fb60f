//! The real binary: `corelane check`, help and the written option reference.
//!
//! Takes the built program, gives verdicts on its exit codes and words. Never starts the gateway.

use std::path::PathBuf;
use std::process::{Command, Output};

use corelane::config::help;
use corelane::config::options::{LATER, OPTIONS, Section};

fn corelane(args: &[&str], env: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_corelane"));
    command.args(args).env_clear().envs(env.iter().copied());
    command.output().expect("the binary runs")
}

fn out(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).expect("UTF-8")
}

fn err(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("UTF-8")
}

/// A file that is removed when the test ends.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str, text: &str) -> Scratch {
        let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("{name}-{}.toml", std::process::id()));
        std::fs::write(&path, text).expect("a scratch file");
        Scratch(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("UTF-8")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[test]
fn a_good_file_gives_one_line() {
    let file = Scratch::new("good", "port = 31000\nworker_urls = ['http://a:1', 'http://b:1']\n");
    let done = corelane(&["check", "--config", file.path()], &[]);
    assert_eq!(done.status.code(), Some(0), "{}", err(&done));
    let line = out(&done);
    assert_eq!(line.lines().count(), 1);
    for word in ["2 workers", "cache_aware", "127.0.0.1:31000", "127.0.0.1:29000", file.path()] {
        assert!(line.contains(word), "{word}: {line}");
    }
    assert_eq!(err(&done), "");
}

#[test]
fn every_mistake_is_told_and_counted() {
    let file = Scratch::new("bad", "prot = 1\npool_size = 0\n\n[[workers]]\nurl = 'https://w'\n");
    let args = ["check", "--config", file.path(), "--max-header", "5", "--selector", "a=b", "--port", "x"];
    let done = corelane(&args, &[("CORELANE_CORES", "0-2,1"), ("CORELANE_HALF_CLOSE", "serv")]);
    assert_eq!(done.status.code(), Some(2));
    assert_eq!(out(&done), "");
    let file = file.path();
    let wanted = [
        "--max-header: no such flag; did you mean --max-headers?".to_owned(),
        "--selector: not supported yet (service discovery); leave it out".to_owned(),
        "--port: \"x\" is not a whole number; give a whole number from 0 to 65535".to_owned(),
        "CORELANE_CORES: core 1 is listed twice; give auto, or cores such as 0-3,6".to_owned(),
        "CORELANE_HALF_CLOSE: \"serv\" is not known; did you mean serve? give one of abort, serve".to_owned(),
        format!("{file}:1:1: \"prot\": no such key; did you mean port?"),
        format!("{file}:2:13: pool_size: \"0\" is out of range; give a whole number from 1 to 65536"),
        format!(
            "{file}:5:7: url: \"https://w\" asks for TLS, which is not supported towards workers; use http:// and \
             terminate TLS beside the worker"
        ),
        "corelane: 8 mistakes to correct; nothing was started".to_owned(),
    ];
    let told = err(&done);
    assert_eq!(told.lines().collect::<Vec<_>>(), wanted, "{told}");
}

#[test]
fn pairs_are_counted_and_nonsense_is_told() {
    let pair = ["check", "--prefill", "http://p:1", "8998", "--decode", "http://d:1", "--decode-policy", "round_robin"];
    let done = corelane(&pair, &[]);
    assert_eq!(done.status.code(), Some(0), "{}", err(&done));
    let line = out(&done);
    assert!(
        line.contains("2 workers (1 prefill, 1 decode), prefill by cache_aware, decode by round_robin, "),
        "{line}"
    );

    let done = corelane(&["check"], &[("CORELANE_PREFILL", "http://p:1 8998"), ("CORELANE_CONNECTOR", "mooncake")]);
    assert_eq!(done.status.code(), Some(2));
    let told = err(&done);
    let wanted = [
        "CORELANE_CONNECTOR: only vLLM has connectors, and no worker is vLLM; add --backend vllm, or leave it out",
        "CORELANE_PREFILL: http://p:1 is a prefill worker without any decode worker of its group and backend (no group, \
         sglang); add one, or give both the same group and backend",
        "corelane: 2 mistakes to correct; nothing was started",
    ];
    assert_eq!(told.lines().collect::<Vec<_>>(), wanted, "{told}");
}

#[test]
fn pairs_are_printed_so_that_they_can_be_read_again() {
    let file = Scratch::new(
        "pairs",
        "prefill = ['http://p:1 8998']\ndecode = ['http://d:1']\n[[workers]]\nurl = 'http://v:1'\nrole = 'prefill'\n\
         backend = 'vllm'\nconnector = 'mooncake'\ngroup = 'g'\nbootstrap_port = 7\ndp_size = 2\nhealth_endpoint = '/ready'\nhealth_timeout_secs = 2.5\n[[workers]]\n\
         url = 'http://w:1'\nrole = 'decode'\nbackend = 'vllm'\nconnector = 'mooncake'\ngroup = 'g'\n",
    );
    let first = corelane(&["check", "--print", "--config", file.path()], &[]);
    assert_eq!(first.status.code(), Some(0), "{}", err(&first));
    let text = out(&first);
    for line in [
        "prefill = [\"http://p:1 8998\"]",
        "backend = \"vllm\"\nconnector = \"mooncake\"\ngroup = \"g\"\nbootstrap_port = 7\ndp_size = 2\nhealth_endpoint = \"/ready\"\n\
         health_timeout_secs = 2.5\n",
        "# decode_policy is not set",
        "\n# Prefill/decode\n",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
    let again = Scratch::new("pairs-again", &text);
    let second = corelane(&["check", "--print", "--config", again.path()], &[]);
    assert_eq!(second.status.code(), Some(0), "{}", err(&second));
    let bare = |text: &str| {
        text.lines().map(|l| l.split('#').next().unwrap_or_default().trim().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(bare(&text), bare(&out(&second)));
}

#[test]
fn serve_refuses_what_check_refuses() {
    let [check, serve] = ["check", "serve"].map(|subcommand| corelane(&[subcommand, "--port", "x"], &[]));
    assert_eq!(serve.status.code(), Some(2));
    assert_eq!(err(&check), err(&serve));
}

#[test]
fn print_shows_values_origins_and_no_keys() {
    let file = Scratch::new(
        "print",
        "port = 1\nbacklog = 7\nkeep_alive_secs = 1.5\nmax_payload_size = 1048576\n[[workers]]\nurl = 'http://w'\n\
         api_key = 'sk-secret'\nmodels = ['m']\n[[extra_routes]]\npath = '/v1/adapters/*'\nmethods = ['GET']\n",
    );
    let env = [("CORELANE_PORT", "2"), ("CORELANE_BACKLOG", "8"), ("CORELANE_CONFIG", file.path())];
    let done = corelane(&["check", "--print", "--port", "3"], &env);
    assert_eq!(done.status.code(), Some(0), "{}", err(&done));
    let text = out(&done);
    let squeezed: Vec<String> = text.lines().map(|l| l.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
    for line in [
        "port = 3 # --port",
        "backlog = 8 # CORELANE_BACKLOG",
        &format!("keep_alive_secs = 1.5 # {}:3:19", file.path()),
        &format!("max_payload_size = \"1MiB\" # {}:4:20", file.path()),
        "host = \"127.0.0.1\" # default",
        "# default_model is not set # default",
        &format!("[[workers]] # {}:6:7", file.path()),
        "url = \"http://w:80\"",
        "# api_key is set, and not shown",
        "methods = [\"GET\"]",
    ] {
        assert!(squeezed.iter().any(|l| l == line), "{line}\n{text}");
    }
    assert!(!text.contains("sk-secret"));

    // Read again it says the same.
    let values = |text: &str| -> Vec<String> {
        let bare = |l: &str| l.split('#').next().unwrap_or_default().trim().to_owned();
        text.lines().map(bare).filter(|l| !l.is_empty()).collect()
    };
    let again = Scratch::new("again", &text);
    let second = corelane(&["check", "--print", "--config", again.path()], &[]);
    assert_eq!(second.status.code(), Some(0), "{}", err(&second));
    assert_eq!(values(&text), values(&out(&second)));
}

#[test]
fn warnings_go_beside_the_verdict() {
    let done = corelane(&["check", "--worker-urls", "http://w", "--pool-idle-ms", "5000"], &[("CORELANE_PROT", "1")]);
    assert_eq!(done.status.code(), Some(0));
    let warned = err(&done);
    assert_eq!(warned.lines().count(), 2, "{warned}");
    assert!(warned.contains("warning: CORELANE_PROT: no option has this name; did you mean CORELANE_PORT?"));
    assert!(warned.contains("warning: --pool-idle-ms: 5000 ms is close to"));
}

#[test]
fn cores_that_are_not_there_are_warned_of() {
    let args = ["check", "--worker-urls", "http://w", "--cores", "1022-1023", "--control-core", "1021"];
    let done = corelane(&args, &[]);
    assert_eq!(done.status.code(), Some(0));
    let warned = err(&done);
    assert!(warned.contains("warning: --cores: this process may not use core 1022, 1023 of this host;"), "{warned}");
    assert!(warned.contains("warning: --control-core: this process may not use core 1021 of this host;"), "{warned}");
}

/// Of paths where `serve` cannot open its log, in its words; no file is left behind.
#[test]
fn an_access_log_that_cannot_be_opened_is_warned_of() {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("check-log-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let path = |name: &str| dir.join(name).to_str().expect("UTF-8").to_owned();
    std::fs::write(path("is.log"), "a line\n").unwrap();
    std::os::unix::fs::symlink(path("target.log"), path("link.log")).unwrap();
    std::os::unix::fs::symlink("link.log", path("chain.log")).unwrap();
    std::os::unix::fs::symlink("nowhere/x.log", path("lost.log")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(path("socket")).unwrap();
    let check = |log: &str, path: &str| {
        let args = ["check", "--worker-urls", "http://w", "--access-log", log, "--access-log-path", path];
        let done = corelane(&args, &[]);
        assert_eq!(done.status.code(), Some(0), "{}", err(&done));
        err(&done)
    };
    for (path, reason) in [
        (path("nowhere/x.log"), "No such file or directory (os error 2)"),
        (path("."), "Is a directory (os error 21)"),
        (path("is.log/x.log"), "Not a directory (os error 20)"),
        (path("lost.log"), "No such file or directory (os error 2)"),
        (path("socket"), "No such device or address (os error 6)"),
    ] {
        let says = format!(
            "warning: the access log {path} cannot be opened: {reason}; change --access-log-path or its rights; serve would \
             refuse it here, as this user\n"
        );
        assert_eq!(check("all", &path), says);
        assert_eq!(check("off", &path), "");
    }
    for good in [path("new.log"), path("is.log"), path("link.log"), path("chain.log"), "stderr".into(), "stdout".into()]
    {
        assert_eq!(check("errors", &good), "", "{good}");
    }
    let mut left: Vec<_> = std::fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["chain.log", "is.log", "link.log", "lost.log", "socket"]);
    assert_eq!(std::fs::read_to_string(path("is.log")).unwrap(), "a line\n");
    std::fs::remove_dir_all(&dir).unwrap();
}

#[test]
fn the_most_headers_are_those_that_the_parser_takes() {
    let most = corelane::http1::MAX_FIELDS;
    for (headers, code) in [(most, 0), (most + 1, 2)] {
        let done = corelane(&["check", "--worker-urls", "http://w", "--max-headers", &headers.to_string()], &[]);
        assert_eq!(done.status.code(), Some(code), "{}", err(&done));
    }
}

#[test]
fn help_names_every_option_with_default_and_range() {
    for subcommand in ["serve", "check"] {
        let done = corelane(&[subcommand, "--help", "--no-such-flag"], &[]);
        assert_eq!(done.status.code(), Some(0));
        let text = out(&done);
        let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
        for row in OPTIONS {
            let flag = row.flag();
            let there = [format!(" {flag} <"), format!(" {flag}[=<")].iter().any(|start| words.contains(start));
            assert!(there, "{flag} is not in the help of {subcommand}");
            let facts = help::flag_text(row).split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(words.contains(&facts), "{facts}");
        }
        for section in Section::ALL {
            assert!(text.contains(&format!("\n{}:\n", section.title())), "{}", section.title());
        }
    }
}

#[test]
fn options_that_come_later_are_not_unknown() {
    for (name, _) in LATER {
        let flag = format!("--{}", name.trim_end_matches('*').replace('_', "-"));
        let done = corelane(&["check", "--worker-urls", "http://w", &flag, "1", "2"], &[]);
        assert_eq!(done.status.code(), Some(2), "{flag}");
        let told = err(&done);
        assert!(told.starts_with(&format!("{flag}: not supported yet (")), "{told}");
        assert_eq!(told.lines().count(), 2, "{told}");
    }
}

#[test]
fn the_program_alone_explains_itself() {
    let bare = corelane(&[], &[]);
    assert_eq!(bare.status.code(), Some(2));
    let asked = corelane(&["--help"], &[]);
    assert_eq!(asked.status.code(), Some(0));
    assert_eq!(out(&bare), out(&asked));
    assert!(out(&asked).contains("serve") && out(&asked).contains("check"));
    assert_eq!(out(&corelane(&["help", "serve"], &[])), out(&corelane(&["serve", "--help"], &[])));
    assert_eq!(out(&corelane(&["help"], &[])), out(&asked));
    assert_eq!(corelane(&["help", "banana"], &[]).status.code(), Some(2));
    let version = corelane(&["--version"], &[]);
    assert_eq!(out(&version).trim(), concat!("corelane ", env!("CARGO_PKG_VERSION")));
    for (args, says) in [
        (&["chek"][..], "\"chek\": no such subcommand; did you mean check?"),
        (&["banana"], "\"banana\": no such subcommand; give one of serve, check"),
        (&["--worker-urls", "http://w"], "--worker-urls: the subcommand is missing; write corelane serve"),
    ] {
        let done = corelane(args, &[]);
        assert_eq!(done.status.code(), Some(2));
        assert!(err(&done).starts_with(says), "{}", err(&done));
    }
}

/// `CORELANE_BLESS=1 cargo test --test cli_check reference` writes it anew.
#[test]
fn the_written_reference_is_that_of_the_table() {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tuning/options.md");
    let wanted = help::reference();
    if std::env::var_os("CORELANE_BLESS").is_some() {
        std::fs::write(&path, &wanted).expect("tuning/options.md can be written");
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(written, wanted, "tuning/options.md drifted: CORELANE_BLESS=1 cargo test --test cli_check reference");
}
