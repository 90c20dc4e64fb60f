//! The configuration file: any text gives mistakes with their places, or a configuration that says the same when it is
//! written down and read again.
//!
//! Takes a text, gives nothing. Never reads a file.

use std::io;

use corelane::config::flags::{self, FromFlags};
use corelane::config::{Config, Loaded, Mistake, Origin, load};

/// Checks one input.
pub fn config_file(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match read(text) {
        Err(mistakes) => {
            assert!(!mistakes.is_empty(), "what is refused has a mistake");
            mistakes.iter().for_each(|mistake| check(text, mistake));
        }
        Ok(loaded) => {
            loaded.warnings.iter().for_each(|warning| check(text, warning));
            assert!(!loaded.summary().contains('\n'));
            let written = loaded.to_toml();
            let again = read(&written).unwrap_or_else(|mistakes| panic!("{written}\n{mistakes:#?}"));
            assert_eq!(shown(&again.config), shown(&loaded.config), "{written}");
        }
    }
}

fn read(text: &str) -> Result<Loaded, Vec<Mistake>> {
    let none = flags::read(&flags::bare("fuzz", "Takes no flags."), &[]).expect("no flags have no mistakes");
    let flags = FromFlags { config_file: Some("c.toml".to_owned()), ..none };
    load(flags, &[], |_: &str| io::Result::Ok(text.to_owned()))
}

/// A mistake is one line, and its place lies in the text.
fn check(text: &str, mistake: &Mistake) {
    let told = mistake.to_string();
    assert!(!told.contains(['\n', '\r']), "{told:?}");
    if let Origin::File { line, column, .. } = mistake.origin
        && line > 0
    {
        let line = text.split('\n').nth(line - 1).expect("the line is one of the text");
        assert!((1..=line.chars().count() + 1).contains(&column), "{told}");
    }
}

/// All of it but keys and secrets, which are not written down.
fn shown(config: &Config) -> String {
    let mut config = config.clone();
    config.target_worker_secret = None;
    config.api_keys.clear();
    config.workers.iter_mut().for_each(|worker| worker.api_key = None);
    format!("{config:#?}")
}
