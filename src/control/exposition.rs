//! The metric table filled in.
//!
//! Takes what lanes have counted, gives OpenMetrics text. Never costs a lane anything: sums are made when
//! somebody asks. Never shows a worker that is gone, nor a request series that never was.

use std::fmt;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text;
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeLabel, EncodeLabelSet, LabelSetEncoder, MetricEncoder, NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use super::fleet::{Bases, usable};
use crate::config::routes::ROUTES;
use crate::fault::What;
use crate::metrics::{Kind, Metric, Row, STATUSES, Scale, Tally, Time, WORKER_STATUSES, status_label};
use crate::shared::Shared;
use crate::shared::reported::Said;
use crate::shared::roster::{OTHER, Slot};
use crate::shared::settings::Reload;
use crate::shared::tallies::{Lane, Observed};
use crate::shared::vitals::{Health, State, Vitals};

/// Media type of the text.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Makes the text, as often as asked.
pub struct Exposition(Registry);

impl Exposition {
    /// An exposition of the process's shared state.
    pub fn new(shared: &'static Shared, bases: Bases) -> Self {
        let mut registry = Registry::default();
        registry.register_collector(Box::new(Source { shared, bases }));
        Exposition(registry)
    }

    /// All metrics as they stand now.
    pub fn text(&self) -> String {
        let mut page = String::with_capacity(16 * 1024);
        // Writing to a string does not fail.
        let _ = text::encode(&mut page, &self.0);
        page
    }
}

struct Source {
    shared: &'static Shared,
    bases: Bases,
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Source")
    }
}

impl Collector for Source {
    fn encode(&self, mut encoder: DescriptorEncoder) -> fmt::Result {
        for &metric in Metric::ALL {
            let mut family = Family::open(&mut encoder, metric.row())?;
            self.computed(metric, &mut family)?;
        }
        self.tallies(&mut encoder)
    }
}

impl Source {
    fn computed(&self, metric: Metric, family: &mut Family) -> fmt::Result {
        match metric {
            Metric::BuildInfo => family.gauge(&[env!("CARGO_PKG_VERSION")], 1),
            Metric::Requests => self.requests(family),
            Metric::Faults => self.faults(family),
            Metric::FirstByte => self.times(family, Time::FirstByte),
            Metric::FirstToken => self.times(family, Time::FirstToken),
            Metric::EventGap => self.times(family, Time::Gap),
            Metric::RequestSeconds => self.times(family, Time::Total),
            Metric::QueueSeconds => self.times(family, Time::Queue),
            Metric::ModelRequests => self.model_requests(family),
            Metric::ModelFirstByte => self.model_times(family, Time::FirstByte),
            Metric::ModelFirstToken => self.model_times(family, Time::FirstToken),
            Metric::ModelEventGap => self.model_times(family, Time::Gap),
            Metric::ModelSeconds => self.model_times(family, Time::Total),
            Metric::ModelQueue => self.model_times(family, Time::Queue),
            Metric::QueueLength => family.gauge(&[], self.shared.admission.waiting().into()),
            Metric::BodyMemory => family.gauge(&[], self.shared.memory.claimed() as i64),
            Metric::PermitsInUse => family.gauge(&[], self.shared.admission.in_use().into()),
            Metric::WorkerInFlight
            | Metric::WorkerSelected
            | Metric::WorkerFailures
            | Metric::WorkerWaits
            | Metric::WorkerUp => self.workers(metric, family),
            Metric::WorkerUsage | Metric::WorkerWaiting | Metric::WorkerShed => self.reported(metric, family),
            Metric::WorkerResponses => self.responses(family),
            Metric::WorkerFlips => self.came_to(family, &Health::ALL.map(|to| (to.name(), to)), Vitals::flips),
            Metric::BreakerState => self.workers(metric, family),
            Metric::BreakerMoves => self.came_to(family, &State::ALL.map(|to| (to.name(), to)), Vitals::moves),
            Metric::Workers => self.states(family),
            Metric::MatchRatio => {
                family.histogram(&[], Scale::Share, self.lanes().iter().map(|lane| lane.matched.read()).sum())
            }
            Metric::Reloads => Reload::ALL
                .iter()
                .try_for_each(|result| family.counter(&[result.name()], self.shared.settings.reloads(*result))),
            Metric::ConfigGeneration => family.gauge(&[], self.shared.settings.generation() as i64),
            Metric::PrefixBytes => family.gauge(&[], self.shared.prefix.counts().bytes as i64),
            Metric::PrefixNodes => family.gauge(&[], self.shared.prefix.counts().nodes as i64),
            Metric::PrefixOwners => family.gauge(&[], self.shared.prefix.counts().owners as i64),
            Metric::PrefixTrims => family.counter(&[], self.shared.prefix.counts().trimmed),
            Metric::PrefixMerges => family.counter(&[], self.shared.prefix.counts().merged),
            Metric::Pipes => {
                family.gauge(&["used"], self.sum(|lane| lane.pipes_used.get()) as i64)?;
                family.gauge(&["resting"], self.sum(|lane| lane.pipes_resting.get()) as i64)
            }
            Metric::PoolIdle => family.gauge(&[], self.sum(|lane| lane.pool_idle.get()) as i64),
            Metric::LaneConnections | Metric::LaneCpu | Metric::LaneSpun | Metric::LaneTasks | Metric::RingBatch => {
                (0..self.lanes().len()).try_for_each(|lane| self.lane(metric, lane, family))
            }
            Metric::AccessLines => {
                let (written, failed) = self.shared.access.lines();
                family.counter(&["written"], written)?;
                family.counter(&["failed"], failed)
            }
        }
    }

    fn lanes(&self) -> &'static [Lane] {
        self.shared.tallies.lanes()
    }

    fn sum(&self, of: impl Fn(&Lane) -> u64) -> u64 {
        self.lanes().iter().map(of).fold(0, u64::wrapping_add)
    }

    fn lane(&self, metric: Metric, at: usize, family: &mut Family) -> fmt::Result {
        let (lane, label) = (&self.lanes()[at], &*at.to_string());
        match metric {
            Metric::LaneCpu => family.seconds(&[label], lane.cpu_us.get()),
            Metric::LaneSpun => family.seconds(&[label], lane.spun_us.get()),
            Metric::LaneTasks => family.gauge(&[label], lane.tasks.get() as i64),
            Metric::RingBatch => family.histogram(&[label], Scale::Batch, lane.batches.read()),
            _ => family.gauge(&[label], self.shared.handover.connections(at).into()),
        }
    }

    /// A histogram of every route that has one.
    fn times(&self, family: &mut Family, time: Time) -> fmt::Result {
        (0..=ROUTES.len()).try_for_each(|route| {
            let all: Observed = self.lanes().iter().map(|lane| lane.times(route, time)).sum();
            family.histogram_if_any(path(route), all)
        })
    }

    /// Models that are counted by name, and their places; the others last.
    fn models(&self) -> Vec<(Box<str>, usize)> {
        let snapshot = self.shared.roster.snapshot();
        let named = snapshot.labels().iter().map(|known| (known.model.clone(), usize::from(known.label.place)));
        named.chain([(OTHER.into(), 0)]).collect()
    }

    fn model_times(&self, family: &mut Family, time: Time) -> fmt::Result {
        let models = self.models();
        models.iter().try_for_each(|(model, place)| {
            family.histogram_if_any(model, self.bases.model_times(self.shared, *place, time))
        })
    }

    fn model_requests(&self, family: &mut Family) -> fmt::Result {
        for (model, place) in self.models() {
            for (status, n) in WORKER_STATUSES.iter().zip(self.bases.model_requests(self.shared, place)) {
                if n > 0 {
                    family.counter(&[&model, status], n)?;
                }
            }
        }
        Ok(())
    }

    fn requests(&self, family: &mut Family) -> fmt::Result {
        for route in 0..=ROUTES.len() {
            for (i, status) in STATUSES.iter().enumerate() {
                let n = self.sum(|lane| lane.requests(route, i));
                if n > 0 {
                    family.counter(&[path(route), &status_label(*status)], n)?;
                }
            }
        }
        Ok(())
    }

    fn faults(&self, family: &mut Family) -> fmt::Result {
        What::ALL.iter().try_for_each(|what| family.counter(&[what.row().code], self.sum(|lane| lane.faults(*what))))
    }

    fn workers(&self, metric: Metric, family: &mut Family) -> fmt::Result {
        for worker in &self.shared.roster.snapshot().workers {
            let labels = &[&*worker.url, worker.role.name()];
            match metric {
                Metric::WorkerInFlight => family.gauge(labels, self.shared.load.word(worker.slot).in_flight().into()),
                Metric::WorkerSelected => family.counter(labels, self.bases.selected(self.shared, worker.slot)),
                Metric::WorkerFailures => family.counter(labels, self.shared.vitals.failed(worker.slot)),
                Metric::WorkerWaits => family.seconds(labels, self.bases.waited_us(self.shared, worker.slot)),
                Metric::BreakerState => family.gauge(
                    labels,
                    match self.shared.vitals.vital(worker.slot).state() {
                        State::Closed | State::Held => 0,
                        State::HalfOpen => 1,
                        State::Open => 2,
                    },
                ),
                _ => family.gauge(labels, usable(self.shared, worker).into()),
            }?;
        }
        Ok(())
    }

    /// What engines say of themselves.
    fn reported(&self, metric: Metric, family: &mut Family) -> fmt::Result {
        for worker in &self.shared.roster.snapshot().workers {
            let (labels, said) = (&[&*worker.url, worker.role.name()], self.shared.reported.said(worker.slot));
            match (metric, said, said.and_then(Said::kv_usage)) {
                (_, None, _) | (Metric::WorkerUsage, _, None) => Ok(()),
                (Metric::WorkerUsage, _, Some(usage)) => family.ratio(labels, usage),
                (Metric::WorkerWaiting, Some(said), _) => family.gauge(labels, said.waiting.into()),
                _ => family.gauge(labels, self.shared.vitals.vital(worker.slot).is_shed().into()),
            }?;
        }
        Ok(())
    }

    fn responses(&self, family: &mut Family) -> fmt::Result {
        for worker in &self.shared.roster.snapshot().workers {
            for (status, n) in WORKER_STATUSES.iter().zip(self.bases.responses(self.shared, worker.slot)) {
                if n > 0 {
                    family.counter(&[&worker.url, worker.role.name(), status], n)?;
                }
            }
        }
        Ok(())
    }

    /// A worker's counts of the states that it came to.
    fn came_to<T: Copy>(
        &self,
        family: &mut Family,
        states: &[(&str, T)],
        count: impl Fn(&Vitals, Slot, T) -> u64,
    ) -> fmt::Result {
        for worker in &self.shared.roster.snapshot().workers {
            for &(name, to) in states {
                let n = count(&self.shared.vitals, worker.slot, to);
                if n > 0 {
                    family.counter(&[&worker.url, worker.role.name(), name], n)?;
                }
            }
        }
        Ok(())
    }

    fn states(&self, family: &mut Family) -> fmt::Result {
        let snapshot = self.shared.roster.snapshot();
        for state in Health::ALL {
            let n = snapshot.workers.iter().filter(|w| self.shared.vitals.health(w.slot) == state).count();
            family.gauge(&[state.name()], n as i64)?;
        }
        Ok(())
    }

    /// The plain counters; rows with one name stand together, whatever their order in the table.
    fn tallies(&self, encoder: &mut DescriptorEncoder) -> fmt::Result {
        for (i, first) in Tally::ALL.iter().enumerate() {
            let (name, _, help) = first.row();
            if Tally::ALL[..i].iter().any(|t| t.row().0 == name) {
                continue;
            }
            let labels: Vec<&'static str> = first.labels().map(|(key, _)| key).collect();
            let row = Row { name, kind: Kind::Counter, labels: &labels, help };
            let mut family = Family::open(encoder, row)?;
            for tally in Tally::ALL[i..].iter().filter(|t| t.row().0 == name) {
                let values: Vec<&str> = tally.labels().map(|(_, value)| value).collect();
                family.counter(&values, self.sum(|lane| lane.get(*tally)))?;
            }
        }
        Ok(())
    }
}

/// One metric being written: its head is out, its samples follow.
struct Family<'a, 'r> {
    encoder: MetricEncoder<'a>,
    labels: &'r [&'static str],
}

impl<'a, 'r> Family<'a, 'r> {
    fn open(encoder: &'a mut DescriptorEncoder, row: Row<'r>) -> Result<Self, fmt::Error> {
        let kind = match row.kind {
            Kind::Counter => MetricType::Counter,
            Kind::Gauge => MetricType::Gauge,
            Kind::Histogram(_) => MetricType::Histogram,
        };
        Ok(Family { encoder: encoder.encode_descriptor(row.name, row.help, None, kind)?, labels: row.labels })
    }

    fn counter(&mut self, values: &[&str], n: u64) -> fmt::Result {
        self.sample(values, |encoder| encoder.encode_counter::<NoLabelSet, u64, f64>(&n, None))
    }

    /// A counter of seconds, of which microseconds are given.
    fn seconds(&mut self, values: &[&str], us: u64) -> fmt::Result {
        let seconds = us as f64 / 1e6;
        self.sample(values, |encoder| encoder.encode_counter::<NoLabelSet, f64, f64>(&seconds, None))
    }

    fn gauge(&mut self, values: &[&str], n: i64) -> fmt::Result {
        self.sample(values, |encoder| encoder.encode_gauge(&n))
    }

    fn ratio(&mut self, values: &[&str], of_one: f64) -> fmt::Result {
        self.sample(values, |encoder| encoder.encode_gauge(&of_one))
    }

    fn sample(&mut self, values: &[&str], write: impl FnOnce(&mut MetricEncoder) -> fmt::Result) -> fmt::Result {
        assert_eq!(values.len(), self.labels.len(), "a sample has as many label values as its row has labels");
        // A label set that is there but empty would be written as `{}`.
        match values {
            [] => write(&mut self.encoder),
            _ => write(&mut self.encoder.encode_family(&Labels(self.labels, values))?),
        }
    }

    /// A histogram of latencies with one label, if anything was observed.
    fn histogram_if_any(&mut self, label: &str, all: Observed) -> fmt::Result {
        if all.count() > 0 { self.histogram(&[label], Scale::Latency, all) } else { Ok(()) }
    }

    fn histogram(&mut self, values: &[&str], scale: Scale, all: Observed) -> fmt::Result {
        // The encoder takes `f64::MAX` for +Inf and makes the counts cumulative.
        let bounds = scale.bounds().iter().map(|&bound| bound as f64 / scale.per_unit()).chain([f64::MAX]);
        let buckets: Vec<(f64, u64)> = bounds.zip(all.counts().iter().copied()).collect();
        let sum = all.sum() as f64 / scale.per_unit();
        self.sample(values, |encoder| encoder.encode_histogram::<NoLabelSet>(sum, all.count(), &buckets, None))
    }
}

/// A route as a label.
fn path(route: usize) -> &'static str {
    ROUTES.get(route).map_or("other", |route| route.path)
}

/// Names and values; the values are escaped here, the encoder writes them as they are.
struct Labels<'a>(&'a [&'static str], &'a [&'a str]);

impl EncodeLabelSet for Labels<'_> {
    fn encode(&self, encoder: &mut LabelSetEncoder) -> fmt::Result {
        self.0.iter().zip(self.1).try_for_each(|(key, value)| (*key, escape(value)).encode(encoder.encode_label()))
    }
}

/// A label's value as it stands in quotes.
pub(super) fn escape(value: &str) -> String {
    value.replace('\\', r"\\").replace('"', r#"\""#).replace('\n', r"\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn label_values_are_escaped() {
        assert_eq!(escape("a\\b\"c\nd"), r#"a\\b\"c\nd"#);
    }
}
