//! The screen of `corelane top`: drawn anew with each reading and each key.
//!
//! Takes readings and keys, gives a terminal that is left as it was found. Never draws what does not fit: of lanes and
//! workers it says how many there are.

use std::sync::mpsc::{Receiver, channel};

use ratatui::Frame;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Cell, Paragraph, Row, Table};

use super::Source;
use super::figures::{Grid, History, Order, Report};
use crate::control::stats::Stats;

/// Widths of the latencies' columns and of the lanes': 80 with the gap between them.
const LATENCY: [u16; 5] = [12, 8, 8, 8, 6];
const LANES: [u16; 5] = [4, 6, 6, 7, 5];
/// Columns of a worker behind its name, and of a class of its answers.
const WORKER: [u16; 7] = [7, 9, 9, 6, 7, 7, 6];
const CLASS: u16 = 7;
/// Least width of a worker's name.
const NAME: u16 = 21;

/// What happens.
enum Message {
    Reading(Result<Box<Stats>, String>),
    Key(KeyEvent),
    /// The terminal has another size.
    Resized,
    /// There is nothing more to come.
    Over(String),
}

/// Shows a gateway until `q`.
///
/// # Errors
/// What is wrong with the terminal.
pub fn run(source: Source) -> Result<(), String> {
    let (send, messages) = channel();
    let keys = send.clone();
    let url = source.url.clone();
    let mut terminal = ratatui::try_init().map_err(|e| format!("the terminal cannot be used: {e}"))?;
    // Both threads end with the process.
    std::thread::spawn(move || {
        if let Err(why) = source.keep_reading(&send, |reading| Message::Reading(reading.map(Box::new))) {
            let _ = send.send(Message::Over(why));
        }
    });
    std::thread::spawn(move || {
        loop {
            let message = match event::read() {
                Ok(Event::Key(key)) if key.kind != KeyEventKind::Release => Message::Key(key),
                Ok(Event::Resize(..)) => Message::Resized,
                Ok(_) => continue,
                Err(e) => Message::Over(format!("the terminal cannot be read: {e}")),
            };
            let is_over = matches!(message, Message::Over(_));
            if keys.send(message).is_err() || is_over {
                return;
            }
        }
    });
    let shown = show(&mut terminal, View::new(url), &messages);
    ratatui::restore();
    shown
}

fn show(terminal: &mut ratatui::DefaultTerminal, mut view: View, messages: &Receiver<Message>) -> Result<(), String> {
    loop {
        terminal.draw(|frame| view.draw(frame)).map_err(|e| format!("the terminal cannot be written to: {e}"))?;
        match messages.recv().map_err(|e| e.to_string())? {
            Message::Reading(reading) => view.take(reading),
            Message::Key(key) if is_end(key) => return Ok(()),
            Message::Key(key) => view.press(key.code),
            Message::Resized => {}
            Message::Over(why) => return Err(why),
        }
    }
}

fn is_end(key: KeyEvent) -> bool {
    let with_control = key.modifiers.contains(KeyModifiers::CONTROL);
    matches!(key.code, KeyCode::Char('q') | KeyCode::Esc) || with_control && key.code == KeyCode::Char('c')
}

/// What is on the screen.
struct View {
    url: String,
    history: History,
    report: Option<Report>,
    /// Why the newest reading failed.
    trouble: Option<String>,
    order: Order,
    /// Workers above the first that is shown.
    above: usize,
    /// Rows of workers that the last drawing had room for.
    page: usize,
}

impl View {
    fn new(url: String) -> View {
        View {
            url,
            history: History::default(),
            report: None,
            trouble: None,
            order: Order::default(),
            above: 0,
            page: 1,
        }
    }

    fn take(&mut self, reading: Result<Box<Stats>, String>) {
        match reading {
            Ok(stats) => {
                self.history.push(*stats);
                self.trouble = None;
            }
            Err(why) => self.trouble = Some(why),
        }
        self.report = self.history.report(self.order);
    }

    fn press(&mut self, key: KeyCode) {
        let all = Order::ALL;
        let at = all.iter().position(|order| *order == self.order).unwrap_or(0);
        match key {
            KeyCode::Down => self.above += 1,
            KeyCode::Up => self.above = self.above.saturating_sub(1),
            KeyCode::PageDown => self.above += self.page,
            KeyCode::PageUp => self.above = self.above.saturating_sub(self.page),
            KeyCode::Home => self.above = 0,
            KeyCode::End => self.above = usize::MAX,
            KeyCode::Right => self.order = all[(at + 1) % all.len()],
            KeyCode::Left => self.order = all[(at + all.len() - 1) % all.len()],
            _ => return,
        }
        self.report = self.history.report(self.order);
    }

    fn draw(&mut self, frame: &mut Frame) {
        let area = frame.area();
        let Some(report) = &self.report else {
            let text = self.trouble.as_deref().unwrap_or("asking …");
            return frame.render_widget(Paragraph::new(format!("{text}\n\nq quits")), area);
        };
        // Some lanes are always seen, all of them where there is room.
        let most = (area.height / 3).max(5);
        let lanes = (report.lanes.rows.len() as u16).clamp(5, most);
        let head = report.lines.len() as u16;
        let [lines, _, middle, _, workers, foot] = Layout::vertical([
            Constraint::Length(head),
            Constraint::Length(u16::from(area.height > 22)),
            Constraint::Length(lanes + 1),
            Constraint::Length(1),
            Constraint::Min(2),
            Constraint::Length(1),
        ])
        .areas(area);
        let mut text = Text::from(report.lines.iter().map(|line| Line::from(line.as_str())).collect::<Vec<_>>());
        if let Some(first) = text.lines.first_mut() {
            first.push_span(format!("  {}", self.url));
            *first = first.clone().style(Style::new().add_modifier(Modifier::BOLD));
        }
        frame.render_widget(Paragraph::new(text), lines);
        let [left, _, right] = Layout::horizontal([
            Constraint::Length(width(&LATENCY)),
            Constraint::Length(2),
            Constraint::Length(width(&LANES)),
        ])
        .areas(middle);
        frame.render_widget(table(&report.latency, &LATENCY, 0, 5), left);
        frame.render_widget(table(&cut(&report.lanes, lanes as usize), &LANES, 0, lanes as usize), right);

        let shown = workers.height.saturating_sub(1) as usize;
        self.page = shown.max(1);
        self.above = self.above.min(report.workers.rows.len().saturating_sub(shown));
        let all = report.workers.rows.len();
        let classes = usize::from(workers.width.saturating_sub(NAME + 1 + width(&WORKER)) / (CLASS + 1));
        let classes = if classes >= report.classes { report.classes } else { 0 };
        let mut widths = vec![0];
        widths.extend(WORKER);
        widths.extend(std::iter::repeat_n(CLASS, classes));
        widths[0] = workers.width.saturating_sub(width(&widths[1..]) + 1).min(60);
        frame.render_widget(table(&report.workers, &widths, self.above, shown), workers);
        self.foot(frame, foot, all, shown);
    }

    fn foot(&self, frame: &mut Frame, area: Rect, all: usize, shown: usize) {
        let (text, style) = match &self.trouble {
            Some(why) => (format!("no answer: {why}"), Style::new().fg(Color::Red)),
            None => {
                let (first, last) = (self.above + usize::from(all > 0), (self.above + shown).min(all));
                let text = format!(
                    "q quits  up, down: workers {first} to {last} of {all}  left, right: by {}",
                    self.order.name()
                );
                (text, Style::new().add_modifier(Modifier::DIM))
            }
        };
        frame.render_widget(Paragraph::new(text).style(style), area);
    }
}

/// Columns with a gap of one between them.
fn width(columns: &[u16]) -> u16 {
    columns.iter().sum::<u16>() + columns.len() as u16 - 1
}

/// The first rows, and how many there are beside them.
fn cut(grid: &Grid, most: usize) -> Grid {
    let mut grid = grid.clone();
    if grid.rows.len() > most {
        let more = grid.rows.len() - (most - 1);
        grid.rows.truncate(most - 1);
        grid.rows.push(vec![format!("+{more}")]);
    }
    grid
}

fn table<'a>(grid: &'a Grid, widths: &[u16], from: usize, most: usize) -> Table<'a> {
    let row = |cells: &[String]| {
        let cells = cells.iter().take(widths.len()).enumerate().map(|(at, text)| {
            let side = if at < grid.left { Alignment::Left } else { Alignment::Right };
            Cell::from(Text::from(text.clone()).alignment(side))
        });
        Row::new(cells.collect::<Vec<_>>())
    };
    let rows: Vec<Row> = grid.rows.iter().skip(from).take(most).map(|cells| row(cells)).collect();
    let heads = row(&grid.heads).style(Style::new().add_modifier(Modifier::DIM));
    Table::new(rows, widths.iter().map(|w| Constraint::Length(*w))).column_spacing(1).header(heads)
}

#[cfg(test)]
mod tests;
