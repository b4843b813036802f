//! What may change while the server runs.

use crate::keys::Keys;
use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};
use taper_attention::AttentionSpec;

/// Who may ask, the attention of requests that say nothing of it, and what others may call by a name. A request has what there
/// was when it came.
#[derive(Debug, Default)]
pub struct Live {
    attention: RwLock<Arc<AttentionSpec>>,
    presets: RwLock<Arc<Presets>>,
    keys: RwLock<Arc<Keys>>,
}

/// Attention by its names.
pub type Presets = BTreeMap<String, AttentionSpec>;

impl Live {
    /// To begin with.
    pub fn new(attention: AttentionSpec, presets: Presets, keys: Keys) -> Self {
        Self {
            attention: RwLock::new(attention.into()),
            presets: RwLock::new(presets.into()),
            keys: RwLock::new(keys.into()),
        }
    }

    /// From now on. Keys that stay as they were keep what they have used up of their limits.
    pub fn set(&self, attention: AttentionSpec, presets: Presets, mut keys: Keys) {
        keys.keep(&self.keys());
        put(&self.attention, attention);
        put(&self.presets, presets);
        put(&self.keys, keys);
    }

    /// The attention of requests that say nothing of it.
    pub fn attention(&self) -> Arc<AttentionSpec> {
        get(&self.attention)
    }

    /// What requests may say by its name.
    pub fn presets(&self) -> Arc<Presets> {
        get(&self.presets)
    }

    /// Keys that are taken; with none, nobody is asked for one.
    pub fn keys(&self) -> Arc<Keys> {
        get(&self.keys)
    }
}

fn get<T>(place: &RwLock<Arc<T>>) -> Arc<T> {
    Arc::clone(&place.read().unwrap_or_else(PoisonError::into_inner))
}

fn put<T>(place: &RwLock<Arc<T>>, value: T) {
    *place.write().unwrap_or_else(PoisonError::into_inner) = value.into();
}
