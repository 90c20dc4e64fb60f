//! What both legs of an SGLang pair are told, so that they find each other.
//!
//! Takes the prefill's address, rooms and the ranks, gives members for the end of a body. Never writes an array for a
//! single prompt, nor a scalar for a batch: an engine reads the one as a batch, and numbers the other's rooms itself.

use super::put;
use super::rooms::{Draw, Rooms, agrees};
use crate::shared::roster::DpRank;

/// A pair, for one request.
#[derive(Clone, Copy)]
pub struct Bootstrap<'a> {
    /// Host of the prefill's URL, IPv6 in brackets.
    pub host: &'a str,
    /// `None`: the engine's own default, which is said as null.
    pub port: Option<u16>,
    pub rooms: &'a Rooms,
    pub draw: Draw,
    /// Rank of the prefill; `None`: the engine chooses.
    pub prefill: Option<DpRank>,
    /// Rank of the decode; `None`: the engine chooses.
    pub decode: Option<DpRank>,
}

impl Bootstrap<'_> {
    /// Appends the members for the prefill leg.
    ///
    /// Without `routed_dp_rank` the engine takes room mod size as its rank, and it wants to be told twice when a rank
    /// disagrees with that.
    pub fn write_prefill(&self, add: &mut Vec<u8>) {
        self.write(add);
        if let Some(dp) = self.prefill {
            rank(add, "routed_dp_rank", dp);
            if !agrees(dp) {
                rank(add, "disagg_prefill_dp_rank", dp);
            }
        }
    }

    /// Appends the members for the decode leg.
    pub fn write_decode(&self, add: &mut Vec<u8>) {
        self.write(add);
        if let Some(dp) = self.prefill {
            rank(add, "disagg_prefill_dp_rank", dp);
        }
        if let Some(dp) = self.decode {
            rank(add, "routed_dp_rank", dp);
        }
    }

    fn write(&self, add: &mut Vec<u8>) {
        add.extend_from_slice(b"\"bootstrap_host\":");
        self.each(add, |add, _| put(add, self.host));
        add.extend_from_slice(b",\"bootstrap_port\":");
        self.each(add, |add, _| put(add, &self.port));
        add.extend_from_slice(b",\"bootstrap_room\":");
        self.each(add, |add, nth| put(add, &self.rooms.room(self.draw, nth, self.prefill)));
    }

    /// The value by itself, or an array of one for each prompt of a batch.
    fn each(&self, add: &mut Vec<u8>, value: impl Fn(&mut Vec<u8>, u32)) {
        match self.draw.batch() {
            0 => value(add, 0),
            batch => {
                for nth in 0..batch {
                    add.push(if nth == 0 { b'[' } else { b',' });
                    value(add, nth);
                }
                add.push(b']');
            }
        }
    }
}

fn rank(add: &mut Vec<u8>, name: &str, dp: DpRank) {
    add.push(b',');
    put(add, name);
    add.push(b':');
    put(add, &dp.rank);
}
