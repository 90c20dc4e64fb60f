//! What engines say of their load.
//!
//! Takes their answers as they are, gives the few numbers that all of them have. Never minds what it does not know.

use serde::Serialize;
use serde_json::Value;

/// An engine's load, over all its ranks.
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
    fn uses(&mut self, usage: Option<f64>) {
        self.kv_usage = usage.into_iter().chain(self.kv_usage).reduce(f64::max);
    }
}

/// SGLang's `/v1/loads`, or the list by rank that `/get_load` gives.
pub fn sglang(said: &Value) -> Option<Report> {
    let ranks = said.get("loads").unwrap_or(said).as_array()?;
    let mut report = Report::default();
    for rank in ranks {
        let number = |name: &str| rank.get(name).and_then(Value::as_u64);
        let waiting = number("num_waiting_reqs").unwrap_or(0);
        // The older answer counts all of them together.
        let all = || number("num_reqs").map(|all| all.saturating_sub(waiting));
        report.running += number("num_running_reqs").or_else(all)?;
        report.waiting += waiting;
        report.uses(rank.get("token_usage").and_then(Value::as_f64));
    }
    (!ranks.is_empty()).then_some(report)
}

/// vLLM's metrics.
pub fn vllm(text: &str) -> Option<Report> {
    let (mut report, mut is_said) = (Report::default(), false);
    for line in text.lines() {
        let Some((name, _)) = line.split_once(['{', ' ']) else { continue };
        let Some(value) = line.rsplit_once(' ').and_then(|(_, value)| value.parse::<f64>().ok()) else { continue };
        match name {
            "vllm:num_requests_running" => {
                report.running += value as u64;
                is_said = true;
            }
            "vllm:num_requests_waiting" => report.waiting += value as u64,
            "vllm:kv_cache_usage_perc" | "vllm:gpu_cache_usage_perc" => report.uses(Some(value)),
            _ => {}
        }
    }
    is_said.then_some(report)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn ranks_are_taken_together() {
        let rank = |running: u64, waiting: u64, usage: f64| json!({"num_running_reqs": running, "num_waiting_reqs": waiting, "token_usage": usage, "x": 1});
        let said = json!({"version": "0", "loads": [rank(2, 1, 0.25), rank(3, 0, 0.5)]});
        assert_eq!(sglang(&said), Some(Report { running: 5, waiting: 1, kv_usage: Some(0.5) }));
        let old = json!([{"dp_rank": 0, "num_reqs": 7, "num_waiting_reqs": 3, "num_tokens": 9}]);
        assert_eq!(sglang(&old), Some(Report { running: 4, waiting: 3, kv_usage: None }));
        for none in [json!({}), json!([]), json!([{"dp_rank": 0}]), json!({"loads": {}})] {
            assert_eq!(sglang(&none), None, "{none}");
        }
        let text = "# HELP vllm:num_requests_running x\nvllm:num_requests_running{engine=\"0\"} 2.0\n\
                    vllm:num_requests_running{engine=\"1\"} 1.0\nvllm:num_requests_waiting{engine=\"0\"} 4.0\n\
                    vllm:kv_cache_usage_perc{engine=\"0\"} 0.5\nvllm:kv_cache_usage_perc{engine=\"1\"} 0.25\nother 1\n";
        assert_eq!(vllm(text), Some(Report { running: 3, waiting: 4, kv_usage: Some(0.5) }));
        assert_eq!(vllm("vllm:num_requests_waiting 4\n"), None);
    }
}
