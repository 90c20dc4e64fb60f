//! The screen on terminals of several sizes.

use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::super::figures::tests::reading;
use super::*;

fn drawn(view: &mut View, width: u16, height: u16) -> Vec<String> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a terminal");
    terminal.draw(|frame| view.draw(frame)).expect("drawn");
    let buffer = terminal.backend().buffer();
    let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
    (0..height).map(line).collect()
}

/// A view of `workers` workers, named by their number.
fn view(workers: usize) -> View {
    let mut view = View::new("http://127.0.0.1:29000".to_owned());
    for second in [10, 12] {
        let mut stats = reading(second);
        let one = stats.workers[0].clone();
        stats.workers = (0..workers)
            .map(|i| crate::control::stats::WorkerStats { url: format!("http://w{i:04}:1"), ..one.clone() })
            .collect();
        view.take(Ok(Box::new(stats)));
    }
    view
}

#[test]
fn it_fits_the_smallest_terminal() {
    let lines = drawn(&mut view(100), 80, 24);
    println!("{}", lines.join("\n"));
    assert_eq!(lines[0], "corelane 0.1.0  ready  up 00:00:12  usable 100/100  http://127.0.0.1:29000");
    assert!(lines[7].starts_with("latency           p50") && lines[7].ends_with("tasks"), "{}", lines[7]);
    assert!(lines[8].starts_with("whole answer   1.0 ms   1.8 ms   2.0 ms      4"), "{}", lines[8]);
    assert!(lines[8].ends_with("0      25 %      3     1.0     9"), "{}", lines[8]);
    assert!(lines[14].starts_with("worker") && lines[14].ends_with("chosen failed"), "{}", lines[14]);
    assert!(lines[15].starts_with("w0000:1"), "{}", lines[15]);
    assert!(lines[22].starts_with("w0007:1"), "{}", lines[22]);
    assert_eq!(lines[23], "q quits  up, down: workers 1 to 8 of 100  left, right: by in flight");
}

#[test]
fn workers_scroll_to_their_end_and_back() {
    let mut view = view(100);
    let mut after = |keys: &[KeyCode]| {
        keys.iter().for_each(|key| view.press(*key));
        drawn(&mut view, 80, 24)[15].split(':').next().unwrap_or_default().to_owned()
    };
    assert_eq!(after(&[KeyCode::Up]), "w0000");
    assert_eq!(after(&[KeyCode::Down, KeyCode::Down]), "w0002");
    assert_eq!(after(&[KeyCode::PageDown]), "w0010");
    assert_eq!(after(&[KeyCode::PageUp]), "w0002");
    assert_eq!(after(&[KeyCode::End]), "w0092");
    assert_eq!(after(&[KeyCode::Down]), "w0092");
    assert_eq!(after(&[KeyCode::Home]), "w0000");
    view.press(KeyCode::Right);
    assert!(drawn(&mut view, 80, 24)[23].ends_with("by chosen/s"));
}

#[test]
fn a_wide_terminal_has_the_answers_too_and_a_tiny_one_does_not_panic() {
    let mut view = view(3);
    let lines = drawn(&mut view, 160, 50);
    assert!(lines.iter().any(|line| line.starts_with("worker") && line.ends_with("2xx     5xx")), "{lines:#?}");
    for (width, height) in [(1, 1), (10, 3), (40, 12), (80, 10)] {
        drawn(&mut view, width, height);
    }
}

#[test]
fn a_gateway_that_is_silent_is_said_to_be() {
    let mut view = view(1);
    view.take(Err("http://x: cannot connect".to_owned()));
    let lines = drawn(&mut view, 80, 24);
    assert_eq!(lines[23], "no answer: http://x: cannot connect");
    assert!(lines[15].starts_with("w0000"), "the last figures stay");
    let mut never = View::new("http://x".to_owned());
    never.take(Err("http://x: cannot connect".to_owned()));
    assert_eq!(drawn(&mut never, 80, 24)[0], "http://x: cannot connect");
}
