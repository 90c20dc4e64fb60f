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

const TOOL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/versus");

/// What steering writes for a run is gone after it, also where the run fails or a setting cannot be written.
const STEER: &str = r#"
import pathlib, sys, tempfile
sys.dont_write_bytecode = True
sys.path.insert(0, sys.argv[1])
import processes, steering
names = [path.name for path in steering.settings()]
assert names == ["rps_sock_flow_entries", "rps_flow_cnt", "rps_cpus"], names
with tempfile.TemporaryDirectory() as place:
    paths = [pathlib.Path(place) / name for name in names]
    read = lambda: [path.read_text() for path in paths]
    for path in paths:
        path.write_text(f"was {path.name}")
    before = read()
    steering.settings = lambda: {path: f"for {path.name}" for path in paths}
    try:
        with steering.steered():
            assert read() == [f"for {name}" for name in names], read()
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert read() == before, read()
    steering.settings = lambda: {paths[0]: "1", pathlib.Path(place) / "no" / "such": "2"}
    try:
        with steering.steered():
            raise SystemExit("entered")
    except processes.Failed as e:
        assert "--steer writes 2 to" in str(e) and "root" in str(e), e
    assert read() == before, read()
print("restored")
"#;

#[test]
fn steering_leaves_nothing_behind() {
    if !runs("python3") {
        return println!("skipped: python3 is not installed");
    }
    let output = Command::new("python3").args(["-c", STEER, TOOL]).stdin(Stdio::null()).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout), "restored\n", "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn the_check_of_versus_passes() {
    if let Some(missing) = ["python3", "cc"].into_iter().find(|p| !runs(p)) {
        return println!("skipped: {missing} is not installed");
    }
    let script = Path::new(TOOL).join("run.py");
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
