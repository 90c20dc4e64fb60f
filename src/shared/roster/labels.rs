//! Which model is counted where: places for the metrics of a bounded number of models.
//!
//! Takes the models of a snapshot that is about to be published, gives each a place for as long as it is on the roster.
//! Never gives a place to another model before every lane has seen that the last one is gone; never has a name that
//! no worker has said.

use crate::limits::MAX_MODEL_LABELS;

/// Where a model is counted, and since when: two models that had one place after another differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Label {
    /// From 1; 0 is that of all that have no place of their own.
    pub place: u16,
    /// Which tenant of the place.
    pub tenant: u32,
}

/// What models without a place are called together; one that is called so has none.
pub const OTHER: &str = "other";

/// A model that has a place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Labelled {
    pub model: Box<str>,
    pub label: Label,
}

/// The book of places; the writer of the roster keeps it.
#[derive(Debug, Default)]
pub(super) struct Labels {
    /// By name.
    known: Vec<Labelled>,
    /// Places whose model has vanished, each with the generation in which it did; oldest first.
    vacated: Vec<(u16, u64)>,
    /// Places that ever had a model.
    used: u16,
    tenants: u32,
}

impl Labels {
    /// Brings the book in line with the models of generation `generation` (sorted, each once); gives it. `settled` is
    /// the oldest generation that some lane may go by. `begin` is told each place that has a new tenant.
    pub(super) fn assign<'a>(
        &mut self,
        models: impl Iterator<Item = &'a str>,
        generation: u64,
        settled: u64,
        mut begin: impl FnMut(u16),
    ) -> &[Labelled] {
        let wanted: Vec<&str> = models.filter(|model| *model != OTHER).collect();
        self.known.retain(|known| {
            let stays = wanted.binary_search(&&*known.model).is_ok();
            if !stays {
                self.vacated.push((known.label.place, generation));
            }
            stays
        });
        for model in wanted {
            let Err(at) = self.known.binary_search_by(|known| (*known.model).cmp(model)) else { continue };
            let free = self.vacated.iter().position(|&(_, vanished)| vanished <= settled);
            let place = match free {
                Some(at) => self.vacated.remove(at).0,
                None if usize::from(self.used) < MAX_MODEL_LABELS => {
                    self.used += 1;
                    self.used
                }
                None => continue,
            };
            self.tenants += 1;
            begin(place);
            self.known.insert(at, Labelled { model: model.into(), label: Label { place, tenant: self.tenants } });
        }
        &self.known
    }
}

const _: () = assert!(MAX_MODEL_LABELS < u16::MAX as usize);

#[cfg(test)]
mod tests {
    use super::*;

    fn assign(labels: &mut Labels, models: &[&str], generation: u64, settled: u64) -> (Vec<(String, u16)>, Vec<u16>) {
        let mut begun = Vec::new();
        let known = labels.assign(models.iter().copied(), generation, settled, |place| begun.push(place));
        (known.iter().map(|k| (k.model.to_string(), k.label.place)).collect(), begun)
    }

    #[test]
    fn places_are_kept_and_given_to_others_only_when_every_lane_has_seen_them_empty() {
        let mut labels = Labels::default();
        let named = |pairs: &[(&str, u16)]| pairs.iter().map(|(n, p)| ((*n).to_owned(), *p)).collect::<Vec<_>>();
        assert_eq!(assign(&mut labels, &["a", "c"], 1, 0), (named(&[("a", 1), ("c", 2)]), vec![1, 2]));
        assert_eq!(assign(&mut labels, &["a", "b", "c"], 2, 1), (named(&[("a", 1), ("b", 3), ("c", 2)]), vec![3]));
        let first = labels.known[0].label;
        assert_eq!(assign(&mut labels, &["b", "c"], 3, 2).1, Vec::<u16>::new());
        assert_eq!(assign(&mut labels, &["b", "c", "d"], 4, 2), (named(&[("b", 3), ("c", 2), ("d", 4)]), vec![4]));
        let (known, begun) = assign(&mut labels, &["a", "b", "c", "d"], 5, 3);
        assert_eq!((known[0].1, begun), (1, vec![1]));
        assert_ne!(labels.known[0].label, first, "who comes back is another tenant");
    }

    #[test]
    fn places_are_bounded() {
        let mut labels = Labels::default();
        let names: Vec<String> = (0..MAX_MODEL_LABELS + 9).map(|i| format!("m{i:03}")).collect();
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let (known, _) = assign(&mut labels, &names, 1, 0);
        assert_eq!(known.len(), MAX_MODEL_LABELS);
        assert_eq!(assign(&mut Labels::default(), &["other"], 1, 0).0, Vec::new());
        assert!(known.iter().all(|(_, place)| (1..=MAX_MODEL_LABELS as u16).contains(place)));
        // One goes, and another has its place when that is safe.
        assert_eq!(assign(&mut labels, &names[1..], 2, 1).0.len(), MAX_MODEL_LABELS - 1);
        assert_eq!(assign(&mut labels, &names[1..], 3, 2).0.len(), MAX_MODEL_LABELS);
    }
}
