//! The tool that measures corelane beside other proxies starts, compiles its parts, and these work.
//!
//! Takes python3 and a C compiler; where one is missing the test is skipped, which the output says. Measures nothing.

use std::path::Path;
use std::process::{Command, Stdio};

fn runs(program: &str) -> bool {
    let mut command = Command::new(program);
    command.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|s| s.success())
}

#[test]
fn the_check_of_versus_passes() {
    if let Some(missing) = ["python3", "cc"].into_iter().find(|p| !runs(p)) {
        return println!("skipped: {missing} is not installed");
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/versus/run.py");
    let mut command = Command::new("python3");
    command.arg(script).args(["--check", "--corelane", env!("CARGO_BIN_EXE_corelane")]).stdin(Stdio::null());
    let output = command.output().unwrap();
    let (said, complained) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}\n{complained}");
    let line =
        |name: &str| said.lines().find(|l| l.starts_with(name)).unwrap_or_else(|| panic!("no {name} in:\n{said}"));
    assert!(line("corelane").contains(concat!("corelane ", env!("CARGO_PKG_VERSION"))), "{said}");
    assert!(line("worker and load work: ").contains(" requests straight to the workers"), "{said}");
    assert!(line("relay works: ").contains(" bytes as they came"), "{said}");
}
