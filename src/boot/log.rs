//! The access log's thread: begun before the lanes, ended after them.
//!
//! Takes the configuration, gives a writer that is stopped with everything written that the lanes had to say. Never
//! waits long at the end for a log that takes nothing: a pipe that nobody reads, a disk that hangs.

use std::sync::mpsc;
use std::thread::{JoinHandle, sleep};
use std::time::{Duration, Instant};

use crate::config::{AccessLog, Config};
use crate::control::access_log::Writer;
use crate::shared::Shared;

/// Time that the writer gets to write what is left.
const PATIENCE: Duration = Duration::from_secs(2);

/// The running writer.
pub(super) struct Log {
    /// Dropped, it stops the writer.
    stop: mpsc::Sender<()>,
    thread: JoinHandle<()>,
}

impl Log {
    /// Starts the writer, if there is a log; lanes can hand records over from now on.
    ///
    /// # Errors
    /// One line for people.
    pub(super) fn start(shared: &'static Shared, config: &Config, lanes: usize) -> Result<Option<Log>, String> {
        if config.access_log == AccessLog::Off {
            return Ok(None);
        }
        let writer = Writer::open(shared, config.access_log_format, &config.access_log_path)?;
        shared.access.open(lanes);
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("access-log".into())
            .spawn(move || writer.run(&stopped))
            .map_err(|e| format!("the thread of the access log could not be started: {e}"))?;
        Ok(Some(Log { stop, thread }))
    }

    /// Has what is left written.
    pub(super) fn end(self) {
        drop(self.stop);
        let begun = Instant::now();
        while !self.thread.is_finished() && begun.elapsed() < PATIENCE {
            sleep(Duration::from_millis(1));
        }
        if !self.thread.is_finished() {
            tracing::warn!("the access log takes nothing: its last lines are lost");
        }
    }
}
