//! The step after a step, begun before it is asked for: rows of answers go on by the tokens that were drawn where the logits
//! are, so that a device has work while the host sees to what the tokens mean.
//!
//! Nothing of it is taken as done before somebody asks for just that: the same rows, the tokens that were drawn, and draws as
//! foreseen. What nobody asks for is forgotten; what it wrote lies beyond its sequences' ends, where the next row to come
//! overwrites it.

use super::ModelBackend;
use crate::backend::{BackendError, Input, Row, Wanted};
use crate::request::RequestError;
use crate::worker::guard;
use candle_core::Tensor;
use taper_attention::{AttentionBatch, Before, Held, NextRow, Sequence, Span};
use taper_kernels::token::{Chosen, Draw};

/// A step that is underway.
pub(super) struct Lookahead {
    rows: Vec<Begun>,
    /// What the rows drew.
    chosen: Chosen,
}

/// One row of it.
struct Begun {
    row: NextRow,
    /// The token that it is of; none before that is known.
    token: Option<u32>,
    draw: Draw,
    /// What its choices came to; none once it was asked for.
    held: Option<Held>,
}

/// An input of one row and one draw, and its place among all.
pub(super) type Placed<'a> = (usize, Input<'a, Sequence>);

/// How an input's one token is drawn, if that is all that it is.
fn draw(input: &Input<'_, Sequence>) -> Option<Draw> {
    match (input.tokens, &input.wants[..]) {
        ([_], [Wanted::Token(draw)]) => Some(*draw),
        _ => None,
    }
}

/// Whether all go on by one row each, whatever they draw.
pub(super) fn go_on(inputs: &[Placed]) -> bool {
    !inputs.is_empty() && inputs.iter().all(|(_, input)| draw(input).is_some() && input.next.is_some())
}

/// A part of a step, a panic of which is an error too.
fn tried<T>(part: impl FnOnce() -> Result<T, BackendError>) -> Result<T, BackendError> {
    guard(|| Ok(part()?)).map_err(|error| match error {
        RequestError::Step(message) => BackendError(message),
        other => BackendError(other.to_string()),
    })
}

impl ModelBackend {
    /// Begins the step after one that is done but for its tokens, which are `[R]`, u32, where the logits are.
    fn begin_ahead(&mut self, inputs: &mut [Placed], tokens: &Tensor) {
        // A row that takes another block gets it now where there are plenty: it will want it next, unless its answer ends.
        if self.pool.free_blocks() > 2 * inputs.len() {
            for (_, input) in &mut *inputs {
                let end = input.sequence.len() + 1;
                let _ = self.pool.grow(input.sequence.table_mut(), end);
            }
        }
        let begun = |(_, input): &Placed| Some((input.sequence.next_row()?, input.next?));
        let Some(begun) = inputs.iter().map(begun).collect::<Option<Vec<_>>>() else { return };
        let draws: Vec<Draw> = begun.iter().map(|(_, draw)| *draw).collect();
        // The step before is done, whatever becomes of this one.
        match guard(|| Ok(self.begin_rows(inputs, tokens, &draws)?)) {
            Ok(Some((chosen, held))) => {
                let row = |((row, draw), held)| Begun { row, token: None, draw, held: Some(held) };
                self.ahead = Some(Lookahead { rows: begun.into_iter().zip(held).map(row).collect(), chosen });
            }
            Ok(None) => {}
            // Whoever asks for the step gets it again, or its error.
            Err(error) => tracing::debug!(%error, "a step ahead failed"),
        }
    }

    fn begin_rows(
        &mut self,
        inputs: &mut [Placed],
        tokens: &Tensor,
        draws: &[Draw],
    ) -> Result<Option<(Chosen, Vec<Held>)>, BackendError> {
        let spans = inputs.iter_mut().map(|(_, input)| Span { sequence: &mut *input.sequence, tokens: 1 }).collect();
        let shape = self.model.attention_shape();
        let mut batch = AttentionBatch::new(shape, self.model.rotary(), &mut self.pool, spans)?;
        batch.put_off();
        // What is audited waits for the device in every layer.
        if !batch.generates() {
            return Ok(None);
        }
        let Some(hidden) = self.model.forward_there(tokens, &batch.positions(), &mut batch)? else { return Ok(None) };
        let chosen = Chosen::new(&self.model.logits(&hidden)?, draws)?;
        Ok(Some((chosen, batch.hold())))
    }

    /// What the rows `at` of a step drew, a row an input, which is done but for that and the reports; first it begins the next
    /// step, if it may. Inputs whose step fails are left as they are, to be [taken back](Self::undo).
    pub(super) fn end_rows(
        &mut self,
        inputs: &mut [Placed],
        chosen: Chosen,
        at: &[usize],
        begins: bool,
    ) -> Result<Vec<Row>, BackendError> {
        if begins {
            let tokens = chosen.tensor();
            let all = at.iter().copied().eq(0..tokens.elem_count());
            let index = || Tensor::from_iter(at.iter().map(|at| *at as u32), tokens.device());
            let tokens = if all { Ok(tokens.clone()) } else { index().and_then(|at| tokens.index_select(&at, 0)) };
            if let Ok(tokens) = tokens {
                self.begin_ahead(inputs, &tokens);
            }
        }
        let ended = tried(|| {
            #[cfg(test)]
            self.ends.next().unwrap_or(Ok(()))?;
            let all = chosen.read()?;
            Sequence::settle(inputs.iter_mut().map(|(_, input)| &mut *input.sequence))?;
            Ok(all)
        });
        let all = ended?;
        let tokens: Vec<Option<u32>> = at.iter().map(|&at| all[at]).collect();
        // Only now is it known which tokens the step ahead is of.
        let begun = self.ahead.iter_mut().flat_map(|ahead| &mut ahead.rows);
        begun.zip(&tokens).for_each(|(begun, token)| begun.token = *token);
        Ok(tokens.into_iter().map(Row::Token).collect())
    }

    /// A step of which a part is underway.
    pub(super) fn follow(
        &mut self,
        mut ahead: Lookahead,
        inputs: Vec<Input<'_, Sequence>>,
    ) -> Result<Vec<Vec<Row>>, BackendError> {
        let mut out = vec![Vec::new(); inputs.len()];
        let (mut found, mut rest) = (Vec::new(), Vec::new());
        for (place, input) in inputs.into_iter().enumerate() {
            match ahead.row_of(&input) {
                Some(at) => found.push((at, (place, input))),
                None => rest.push((place, input)),
            }
        }
        let whole = rest.is_empty();
        // In the order that they were begun in, in which answers by one method stand together.
        found.sort_by_key(|(at, _)| *at);
        let (at, mut found): (Vec<usize>, Vec<Placed>) = found.into_iter().unzip();
        let before = found.iter().map(|(_, input)| input.sequence.before()).collect();
        for (&at, (_, input)) in at.iter().zip(&mut found) {
            if let Some(held) = ahead.rows[at].held.take() {
                input.sequence.follow(&mut self.pool, held);
            }
        }
        let done = || -> Result<(), BackendError> {
            if !found.is_empty() {
                let begins = whole && go_on(&found);
                let drawn = self.end_rows(&mut found, ahead.chosen, &at, begins)?;
                found.iter().zip(drawn).for_each(|((place, _), row)| out[*place].push(row));
            }
            if !whole {
                let (places, rest): (Vec<_>, Vec<_>) = rest.into_iter().unzip();
                // Last: of what it has done, a prompt's tokens cannot be taken back, and of the others a row each can.
                // What is begun ahead is begun for all or none, or they would never meet in a step again.
                let rows = tried(|| self.step(rest, found.is_empty()))?;
                places.into_iter().zip(rows).for_each(|(place, rows)| out[place] = rows);
            }
            Ok(())
        };
        done().inspect_err(|_| self.undo(&mut found, before))?;
        self.followed += at.len();
        Ok(out)
    }

    /// Makes each what it was before: the step failed that took a row of it in.
    pub(super) fn undo(&mut self, inputs: &mut [Placed], before: Vec<Before>) {
        self.ahead = None;
        for ((_, input), before) in inputs.iter_mut().zip(before) {
            if let Err(error) = input.sequence.take_back(&mut self.pool, before) {
                tracing::error!(%error, "a step that failed could not be undone");
            }
        }
    }
}

impl Lookahead {
    /// The row that is what an input asks for.
    fn row_of(&self, input: &Input<'_, Sequence>) -> Option<usize> {
        let (draw, row) = (draw(input)?, input.sequence.next_row()?);
        self.rows.iter().position(|begun| {
            begun.draw == draw
                && begun.token.is_some()
                && begun.token.as_ref() == input.tokens.first()
                && begun.row == row
        })
    }
}
