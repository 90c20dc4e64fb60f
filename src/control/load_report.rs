//! What engines say of their load.
//!
//! Takes their answers as they are, gives the few numbers that all of them have, by data-parallel rank or together. Never
//! minds what it does not know, and never believes a number that cannot be.

use serde::Serialize;
use serde_json::Value;

use super::merge::Sample;
use crate::limits::MAX_DP_SIZE;

/// An engine's load, over all its ranks; or that of one of them.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Requests that run.
    pub running: u64,
    /// Requests that wait in the engine.
    pub waiting: u64,
    /// Used part of the KV cache, from 0 to 1, of the rank with the most; `null`: not said.
    pub kv_usage: Option<f64>,
}

impl Report {
    /// Takes a usage in, if it can be one: what is negative or no number is not said, more than all is all.
    fn uses(&mut self, usage: Option<f64>) {
        let usage = usage.filter(|usage| *usage >= 0.0).map(|usage| usage.min(1.0));
        self.kv_usage = usage.into_iter().chain(self.kv_usage).reduce(f64::max);
    }

    fn add(&mut self, other: &Report) {
        self.running = self.running.saturating_add(other.running);
        self.waiting = self.waiting.saturating_add(other.waiting);
        self.uses(other.kv_usage);
    }
}

/// The load of an engine's ranks, in the order in which they came; without a number where the engine does not count them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Ranks(Vec<(Option<u32>, Report)>);

impl Ranks {
    /// All of them together.
    pub fn total(&self) -> Report {
        self.0.iter().fold(Report::default(), |mut total, (_, report)| {
            total.add(report);
            total
        })
    }

    /// One of them, if it is there.
    pub fn of(&self, rank: u32) -> Option<&Report> {
        self.0.iter().find(|(known, _)| *known == Some(rank)).map(|(_, report)| report)
    }

    /// The entry of a rank; `None` when there are too many.
    fn entry(&mut self, rank: Option<u32>) -> Option<&mut Report> {
        let at = match self.0.iter().position(|(known, _)| *known == rank) {
            Some(at) => at,
            None if self.0.len() < MAX_DP_SIZE as usize => {
                self.0.push((rank, Report::default()));
                self.0.len() - 1
            }
            None => return None,
        };
        Some(&mut self.0[at].1)
    }
}

/// SGLang's `/v1/loads`, or the list by rank that `/get_load` gives; `None` unless each entry says how much runs.
pub fn sglang(said: &Value) -> Option<Ranks> {
    let list = said.get("loads").unwrap_or(said).as_array()?;
    let mut ranks = Ranks::default();
    for one in list {
        let number = |name: &str| one.get(name).and_then(Value::as_u64);
        let waiting = number("num_waiting_reqs").unwrap_or(0);
        // The older answer counts all of them together.
        let all = || number("num_reqs").map(|all| all.saturating_sub(waiting));
        let mut report = Report { running: number("num_running_reqs").or_else(all)?, waiting, kv_usage: None };
        report.uses(one.get("token_usage").and_then(Value::as_f64));
        let rank = number("dp_rank").and_then(|rank| u32::try_from(rank).ok());
        ranks.entry(rank)?.add(&report);
    }
    (!list.is_empty()).then_some(ranks)
}

/// Either engine's metrics; `None` unless they say how much runs.
pub fn metrics(text: &str) -> Option<Ranks> {
    let (mut ranks, mut is_said) = (Ranks::default(), false);
    let is_engines = |line: &&str| line.starts_with("sglang:") || line.starts_with("vllm:");
    for sample in text.lines().filter(is_engines).filter_map(Sample::parse) {
        let Ok(value) = sample.value.parse::<f64>() else { continue };
        let rank = || ["dp_rank", "engine"].iter().find_map(|key| sample.label(key)?.parse().ok());
        // What cannot be a count is none; `as` makes the greatest of what is too great.
        let count = if value >= 0.0 { value as u64 } else { 0 };
        let report = match sample.name {
            "sglang:num_running_reqs" | "vllm:num_requests_running" => {
                is_said = true;
                Report { running: count, ..Report::default() }
            }
            "sglang:num_queue_reqs" | "vllm:num_requests_waiting" => Report { waiting: count, ..Report::default() },
            "sglang:token_usage" | "vllm:kv_cache_usage_perc" | "vllm:gpu_cache_usage_perc" => {
                Report { kv_usage: Some(value), ..Report::default() }
            }
            _ => continue,
        };
        ranks.entry(rank())?.add(&report);
    }
    is_said.then_some(ranks)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn report(running: u64, waiting: u64, kv_usage: impl Into<Option<f64>>) -> Report {
        Report { running, waiting, kv_usage: kv_usage.into() }
    }

    #[test]
    fn sglang_says_its_load_by_rank() {
        let rank = |rank: u32, running: u64, waiting: u64, usage: Value| json!({"dp_rank": rank, "num_running_reqs": running, "num_waiting_reqs": waiting, "token_usage": usage, "x": [{}]});
        for (said, total, first) in [
            (
                json!({"timestamp": "t", "version": "0.5", "loads": [rank(0, 2, 1, json!(0.25)), rank(1, 3, 0, json!(0.5))]}),
                report(5, 1, 0.5),
                Some(report(2, 1, 0.25)),
            ),
            (
                json!([{"dp_rank": 0, "num_reqs": 7, "num_waiting_reqs": 3, "num_tokens": 9}]),
                report(4, 3, None),
                Some(report(4, 3, None)),
            ),
            (json!({"loads": [{"num_running_reqs": 1}]}), report(1, 0, None), None),
            (json!({"loads": [{"num_running_reqs": 1, "dp_rank": -1}]}), report(1, 0, None), None),
            (json!({"loads": [rank(0, 1, 0, json!("0.9"))]}), report(1, 0, None), Some(report(1, 0, None))),
            (json!({"loads": [rank(0, 1, 0, json!(-0.5))]}), report(1, 0, None), Some(report(1, 0, None))),
            (json!({"loads": [rank(0, 1, 0, json!(1e300))]}), report(1, 0, 1.0), Some(report(1, 0, 1.0))),
            (
                json!({"loads": [rank(0, u64::MAX, u64::MAX, json!(0)), rank(1, 1, 1, json!(0))]}),
                report(u64::MAX, u64::MAX, 0.0),
                Some(report(u64::MAX, u64::MAX, 0.0)),
            ),
        ] {
            let ranks = sglang(&said).unwrap_or_else(|| panic!("{said}"));
            assert_eq!((ranks.total(), ranks.of(0)), (total, first.as_ref()), "{said}");
        }
        let many: Vec<Value> = (0..MAX_DP_SIZE + 1).map(|n| rank(n, 1, 0, json!(0))).collect();
        for none in [
            json!({}),
            json!([]),
            json!(7),
            json!([{"dp_rank": 0}]),
            json!({"loads": {}}),
            json!({"loads": [rank(0, 1, 0, json!(0)), 7]}),
            json!({"loads": [{"num_running_reqs": -1}]}),
            json!({"loads": [{"num_running_reqs": 1.5}]}),
            json!({"loads": many}),
        ] {
            assert_eq!(sglang(&none), None, "{none}");
        }
    }

    #[test]
    fn metrics_of_both_engines_are_read() {
        let vllm = "# HELP vllm:num_requests_running x\n# TYPE vllm:num_requests_running gauge\n\
                    vllm:num_requests_running{engine=\"0\",model_name=\"a/b\"} 2.0\n\
                    vllm:num_requests_running{engine=\"1\",model_name=\"a/b\"} 1.0\n\
                    vllm:num_requests_waiting{engine=\"0\",model_name=\"a/b\"} 4.0\n\
                    vllm:kv_cache_usage_perc{engine=\"0\",model_name=\"a/b\"} 0.5\n\
                    vllm:kv_cache_usage_perc{engine=\"1\",model_name=\"a/b\"} 0.25\nother 1\n";
        let sglang = "sglang:num_running_reqs{model_name=\"m\",tp_rank=\"0\",dp_rank=\"1\"} 3.0 1700000000\r\n\
                      sglang:num_queue_reqs{model_name=\"m\",dp_rank=\"1\"} 9\r\n\
                      sglang:token_usage{model_name=\"m\",dp_rank=\"1\"} 7.5e-1\r\n";
        for (text, total, second) in [
            (vllm, report(3, 4, 0.5), Some(report(1, 0, 0.25))),
            (sglang, report(3, 9, 0.75), Some(report(3, 9, 0.75))),
            ("vllm:num_requests_running 2\nvllm:gpu_cache_usage_perc 0.125\n", report(2, 0, 0.125), None),
            (
                "vllm:num_requests_running{m=\"} 7 {\\\"\",engine=\"1\"} 2\n",
                report(2, 0, None),
                Some(report(2, 0, None)),
            ),
            ("vllm:num_requests_running{m=\"engine=\\\"1\\\"\"} 2\n", report(2, 0, None), None),
            (
                "vllm:num_requests_running NaN\nvllm:num_requests_waiting -3\nvllm:kv_cache_usage_perc NaN\n",
                report(0, 0, None),
                None,
            ),
            (
                "vllm:num_requests_running +Inf\nvllm:num_requests_waiting 1e99\nvllm:kv_cache_usage_perc +Inf\n",
                report(u64::MAX, u64::MAX, 1.0),
                None,
            ),
            (
                "sglang:num_running_reqs{dp_rank=\"x\"} 1\nsglang:token_usage{dp_rank=\"\"} 0.5\n",
                report(1, 0, 0.5),
                None,
            ),
        ] {
            let ranks = metrics(text).unwrap_or_else(|| panic!("{text}"));
            assert_eq!((ranks.total(), ranks.of(1)), (total, second.as_ref()), "{text}");
        }
        let many: String =
            (0..MAX_DP_SIZE + 1).map(|n| format!("vllm:num_requests_running{{engine=\"{n}\"}} 1\n")).collect();
        for none in [
            "",
            "\u{0}\u{ff}",
            "vllm:num_requests_waiting 4\n",
            "vllm:num_requests_running\n",
            "vllm:num_requests_running{\n",
            "vllm:num_requests_running{a=\"b} 1\n",
            "vllm:num_requests_running{} x\n",
            "vllm:num_requests_running_total 3\n",
            &many,
        ] {
            assert_eq!(metrics(none), None, "{none}");
        }
    }
}
