//! `corelane top` as people run it: against a gateway, without a terminal and in one.
//!
//! Takes `script` of util-linux for the terminal. Where there is none that part is skipped, which the output says.

mod children;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Output, Stdio};

use children::{BINARY, command, gateway, until, worker};

fn post(address: SocketAddr) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(children::PATIENCE)).unwrap();
    let body = r#"{"model":"mock","prompt":"hello","max_tokens":1}"#;
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json";
    write!(stream, "{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

fn top(args: &[&str]) -> Output {
    command(&[&["top"], args].concat()).output().unwrap()
}

#[test]
fn without_a_terminal_it_is_a_text() {
    let (_worker, url) = worker(0, &[]);
    let (mut gateway, address) = gateway(&[&url], &[]);
    let admin = format!("http://{}", gateway.announced("admin"));
    (0..3).for_each(|_| post(address));
    for args in [&["--admin", &admin][..], &["--once", "--admin", &admin, "--token", "any"]] {
        let done = top(args);
        let text = String::from_utf8(done.stdout).unwrap();
        assert!(done.status.success(), "{text}{}", String::from_utf8_lossy(&done.stderr));
        println!("{text}");
        assert!(text.starts_with(concat!("corelane ", env!("CARGO_PKG_VERSION"), "  ready  up 00:0")), "{text}");
        assert!(text.contains("\nlatency ") && text.contains("\nlane  busy"), "{text}");
        let row = text.lines().find(|line| line.starts_with(url.trim_start_matches("http://"))).expect("the worker");
        let cells: Vec<&str> = row.split_whitespace().collect();
        // Role, state, breaker, in flight, chosen a second, chosen, failed, answered well.
        assert_eq!(cells[1..9], ["regular", "ready", "closed", "0", "0.0", "3", "0", "3"], "{text}");
    }
}

#[test]
fn what_cannot_be_shown_is_said() {
    let (mut worker, url) = worker(0, &[]);
    // A worker is no gateway.
    let done = top(&["--once", "--admin", &url]);
    assert_eq!(done.status.code(), Some(1));
    let told = String::from_utf8(done.stderr).unwrap();
    assert!(told.contains("answered with 404; is it the admin listener of a corelane?"), "{told}");
    worker.kill();
    let done = top(&["--once", "--admin", &url]);
    assert_eq!((done.status.code(), done.stdout.len()), (Some(1), 0));
    assert!(String::from_utf8(done.stderr).unwrap().contains("cannot connect"));
    for (args, wanted) in [
        (&["--admin", "nonsense://x"][..], "--admin: "),
        (&["--admin"], "--admin: needs a value (url); write --admin VALUE"),
        (&["--onec"], "--onec: no such flag; did you mean --once?"),
    ] {
        let done = top(args);
        let told = String::from_utf8(done.stderr).unwrap();
        assert_eq!(done.status.code(), Some(2), "{told}");
        assert!(told.contains(wanted), "{told}");
    }
}

#[test]
fn in_a_terminal_it_is_a_screen_until_q() {
    let (_worker, url) = worker(0, &[]);
    let (mut gateway, _) = gateway(&[&url], &[]);
    let admin = gateway.announced("admin");
    let mut script = std::process::Command::new("script");
    let inside = format!("stty cols 80 rows 24; {BINARY} top --admin http://{admin}; echo ended with $?");
    script.args(["-qec", &inside, "/dev/null"]).env("TERM", "xterm-256color");
    let Ok(mut child) = script.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn() else {
        return println!("skipped: no program script");
    };
    let (mut keys, mut out) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let (send, pieces) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let mut piece = [0; 4096];
        while let Ok(n @ 1..) = out.read(&mut piece) {
            let _ = send.send(String::from_utf8_lossy(&piece[..n]).into_owned());
        }
    });
    let mut seen = String::new();
    let name = url.trim_start_matches("http://").to_owned();
    until("the screen is drawn", || {
        seen.extend(pieces.try_iter());
        seen.contains(&name) && seen.contains("q quits")
    });
    assert!(seen.contains("\x1b[?1049h"), "a screen of its own");
    keys.write_all(b"\x1b[B\x1b[Cq").unwrap();
    until("it has ended", || {
        seen.extend(pieces.try_iter());
        seen.contains("ended with 0")
    });
    assert!(seen.contains("\x1b[?1049l"), "the terminal is given back");
    assert!(seen.contains("chosen/s"), "another order");
    drop(keys);
    assert!(child.wait().unwrap().success());
}
