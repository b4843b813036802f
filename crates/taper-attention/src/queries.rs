//! The queries of a sequence's latest tokens, for methods that choose by the token before.

use crate::layer::AttentionShape;
use candle_core::{DType, Device, Result, Tensor};

/// By layer those of the latest rows that came together, and of those before them: a step that comes again finds the query
/// that it found, and rows that are let go leave those before them as they were.
#[derive(Debug, Default)]
pub(crate) struct Queries {
    layers: Vec<[Option<Rows>; 2]>,
    /// On a device, memory that a step of single rows writes their queries to as it rotates them, by turns
    /// `[2, layers, q_heads, head_dim]`; made with the first.
    kept: Option<Tensor>,
    /// The tokens whose queries of all layers are there.
    there: [Option<usize>; 2],
}

/// Consecutive tokens' queries.
#[derive(Debug, Clone)]
struct Rows {
    /// The first token's position.
    first: usize,
    /// `[T, q_heads, head_dim]`, after the rotary embedding: memory of their own, or on a device a part of what the token two
    /// places on is written to.
    q: Tensor,
}

impl Rows {
    fn end(&self) -> usize {
        self.first + self.q.dims()[0]
    }
}

impl Queries {
    /// Takes a layer's queries `[T, q_heads, head_dim]` of tokens from position `first` on.
    pub fn put(&mut self, layer: usize, first: usize, q: Tensor) {
        if self.layers.len() <= layer {
            self.layers.resize_with(layer + 1, Default::default);
        }
        cut(&mut self.layers[layer], first);
        let [latest, before] = &mut self.layers[layer];
        if latest.is_some() {
            *before = latest.take();
        }
        *latest = Some(Rows { first, q });
    }

    /// That of the token at a position `[1, q_heads, head_dim]`, if it is known.
    pub fn at(&self, layer: usize, position: usize) -> Result<Option<Tensor>> {
        let mut rows = self.layers.get(layer).into_iter().flatten().flatten();
        let rows = rows.find(|rows| (rows.first..rows.end()).contains(&position));
        rows.map(|rows| rows.q.narrow(0, position - rows.first, 1)).transpose()
    }

    /// Forgets all tokens but the first so many.
    pub fn cut(&mut self, tokens: usize) {
        self.layers.iter_mut().for_each(|layer| cut(layer, tokens));
        self.there.iter_mut().for_each(|there| *there = there.filter(|&position| position < tokens));
    }

    /// Where a step's row at a position has its queries written to `[layers, q_heads, head_dim]`, of a cache's dtype: over those
    /// of the token but one before.
    pub fn memory(&mut self, position: usize, shape: &AttentionShape, cache: &Tensor) -> Result<Tensor> {
        let kept = match &self.kept {
            Some(kept) => kept,
            None => {
                let dims = (2, shape.layers, shape.q_heads, shape.head_dim);
                self.kept.insert(Tensor::zeros(dims, cache.dtype(), cache.device())?)
            }
        };
        self.there[position % 2] = None;
        kept.get(position % 2)
    }

    /// Takes a layer's queries of the row at a position as written there.
    pub fn written(&mut self, layer: usize, position: usize) -> Result<()> {
        let Some(kept) = &self.kept else { return Ok(()) };
        let q = kept.get(position % 2)?.narrow(0, layer, 1)?;
        if layer + 1 == kept.dims()[1] {
            self.there[position % 2] = Some(position);
        }
        self.put(layer, position, q);
        Ok(())
    }

    /// Those of the token at a position in all layers `[layers, q_heads, head_dim]`, where they lie together on a device.
    pub fn in_all_layers(&self, position: usize) -> Result<Option<Tensor>> {
        let kept = self.kept.as_ref().filter(|_| self.there[position % 2] == Some(position));
        kept.map(|kept| kept.get(position % 2)).transpose()
    }

    /// Elements of the memory that rows in host memory keep.
    #[cfg(test)]
    pub fn elements(&self) -> usize {
        let of = |rows: &Rows| match &*rows.q.storage_and_layout().0 {
            candle_core::Storage::Cpu(candle_core::CpuStorage::F32(all)) => all.len(),
            other => panic!("{other:?}"),
        };
        self.layers.iter().flatten().flatten().map(of).sum()
    }

    /// A copy, for a cache on a device and of a dtype where that is another: queries in host memory are f32.
    pub fn copied(&self, cache: Option<(&Device, DType)>) -> Result<Self> {
        let rows = |rows: &Rows| -> Result<Rows> {
            let q = match cache {
                Some((device, _)) if device.is_cpu() => rows.q.to_device(device)?.to_dtype(DType::F32)?,
                Some((device, dtype)) => rows.q.to_device(device)?.to_dtype(dtype)?,
                None => rows.q.clone(),
            };
            Ok(Rows { first: rows.first, q: q.force_contiguous()? })
        };
        let layer = |[latest, before]: &[Option<Rows>; 2]| -> Result<_> {
            Ok([latest.as_ref().map(rows).transpose()?, before.as_ref().map(rows).transpose()?])
        };
        Ok(Self { layers: self.layers.iter().map(layer).collect::<Result<_>>()?, ..Self::default() })
    }
}

/// Forgets the tokens from a position on.
fn cut(layer: &mut [Option<Rows>; 2], from: usize) {
    for slot in &mut *layer {
        match slot {
            Some(rows) if rows.first >= from => *slot = None,
            Some(rows) if rows.end() > from => {
                rows.q = rows.q.narrow(0, 0, from - rows.first).expect("fewer rows than there are");
            }
            _ => {}
        }
    }
    if layer[0].is_none() {
        layer.swap(0, 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(tokens: &[f32]) -> Tensor {
        Tensor::from_slice(tokens, (tokens.len(), 1, 1), &Device::Cpu).unwrap()
    }

    #[test]
    fn a_token_is_known_until_two_steps_have_come_or_it_is_let_go() {
        let mut queries = Queries::default();
        let of = |queries: &Queries, at| -> Option<f32> {
            Some(queries.at(1, at).unwrap()?.flatten_all().unwrap().to_vec1::<f32>().unwrap()[0])
        };
        queries.put(1, 4, rows(&[4.0, 5.0]));
        assert_eq!([3, 4, 5, 6].map(|at| of(&queries, at)), [None, Some(4.0), Some(5.0), None]);
        assert_eq!(queries.at(0, 5).unwrap().is_none(), queries.at(2, 5).unwrap().is_none());
        queries.put(1, 6, rows(&[6.0]));
        // The same step again, by another token.
        queries.put(1, 6, rows(&[60.0, 70.0, 80.0]));
        assert_eq!([5, 6, 8].map(|at| of(&queries, at)), [Some(5.0), Some(60.0), Some(80.0)]);
        queries.cut(7);
        assert_eq!([5, 6, 7].map(|at| of(&queries, at)), [Some(5.0), Some(60.0), None]);
        queries.put(1, 7, rows(&[7.0]));
        assert_eq!([5, 6, 7].map(|at| of(&queries, at)), [None, Some(60.0), Some(7.0)]);
        let copy = queries.copied(Some((&Device::Cpu, DType::F16))).unwrap();
        assert_eq!((queries.elements(), copy.elements()), (4, 2), "a copy has what is left");
        queries.cut(6);
        assert_eq!([5, 6, 7].map(|at| of(&queries, at)), [None; 3]);
        assert_eq!(of(&copy, 7), Some(7.0));
    }
}
