//! Read-only memory maps of checkpoint files.
//!
//! Every range that is read of a map was checked against its length, which is the file's when it was opened. The file has to
//! keep that length for as long as it is served: who shortens it, by copying another over it say, ends the process with
//! SIGBUS at the next read past the new end, and no reader of a map can turn that into an error. A new version is put in
//! place by renaming it over the old one, which leaves the map with the old bytes.

use crate::error::ModelError;
use memmap2::Mmap;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A file in memory; clones share the map.
#[derive(Debug, Clone)]
pub(crate) struct MappedFile {
    path: PathBuf,
    map: Arc<Mmap>,
}

impl MappedFile {
    /// Maps a whole file.
    pub(crate) fn open(path: &Path) -> Result<Self, ModelError> {
        let (file, _) = crate::json::open_regular(path)?;
        // SAFETY: the map is read-only and private to this process's checkpoint; a checkpoint that another process
        // shortens while it is served is outside what any reader of a map can guard against.
        let map = unsafe { Mmap::map(&file) }.map_err(|e| ModelError::io(path, e))?;
        Ok(Self { path: path.to_owned(), map: Arc::new(map) })
    }

    /// The file's path.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// The file's bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Lets the system drop the pages of a range that has been copied out; they come back if read again.
    pub(crate) fn release(&self, range: &Range<usize>) {
        #[cfg(unix)]
        {
            // SAFETY: the map is a read-only map of a file, so dropped pages are read back unchanged.
            let advised = unsafe {
                self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start, range.len())
            };
            if let Err(error) = advised {
                tracing::debug!(%error, "the system kept the pages of a tensor that was copied");
            }
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}
