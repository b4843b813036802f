//! What the drafts of a round read where the first of them chooses for all.

use taper_kernels::decode::Selection;

/// The choices of a round's first draft, by layer. Empty between rounds.
#[derive(Debug, Default)]
pub(crate) struct Round(Vec<Option<Held>>);

/// The choice of a row in one layer.
#[derive(Debug)]
struct Held {
    selection: Selection,
    /// How many tokens the row saw.
    seen: usize,
}

impl Round {
    /// Has the drafts after a row keep to its choice. `tokens` are those of the sequence with the row's own.
    pub fn hold(&mut self, layer: usize, selection: Selection, tokens: usize) {
        self.0.resize_with(self.0.len().max(layer + 1), || None);
        self.0[layer] = Some(Held { selection, seen: tokens });
    }

    /// The choice that the row after `tokens` tokens keeps to in a layer, and how many its own row saw. What was held by a
    /// step of this same row that failed does not count.
    pub fn held(&self, layer: usize, tokens: usize) -> Option<(&Selection, usize)> {
        let held = self.0.get(layer)?.as_ref()?;
        (held.seen <= tokens).then_some((&held.selection, held.seen))
    }
}
