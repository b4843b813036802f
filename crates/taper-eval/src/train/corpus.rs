//! What a model is run over to learn from: token sequences of one length, some of them held out.

use super::error::TrainError;
use crate::prose::Prose;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use sha2::{Digest, Sha256};
use std::collections::HashSet;
use std::io::Read;
use std::path::{Path, PathBuf};
use taper_model::{Model, Tokenizer};

/// Sequences of one length. Every eighth is held out from training and measured on; of fewer than eight the last.
#[derive(Debug, Clone)]
pub struct Corpus {
    source: String,
    sequences: Vec<Vec<u32>>,
}

/// How much text is taken.
#[derive(Debug, Clone, Copy)]
pub struct CorpusSize {
    /// Tokens of a sequence.
    pub length: usize,
    /// Most sequences.
    pub sequences: usize,
}

/// One sequence of so many is held out.
const HELD_OUT: usize = 8;

/// A token of text has no more bytes than this on average, by far.
const TOKEN_BYTES: usize = 16;

impl Corpus {
    /// The text of files and folders, or where none are given prose of a seed.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn open(tokenizer: &Tokenizer, paths: &[PathBuf], seed: u64, size: CorpusSize) -> Result<Self, TrainError> {
        if paths.is_empty() { Self::prose(tokenizer, seed, size) } else { Self::read(tokenizer, paths, size) }
    }

    /// Reads UTF-8 files, and those of folders (`.txt` and `.md`, folders within them too, each once whatever links lead to
    /// it, and none that lies outside) in the order of their names, until there is enough. The tokens of all files make one
    /// stream, which is cut into sequences; each begins with what the tokenizer puts at the start of a text.
    ///
    /// # Errors
    /// A file that cannot be read or is not UTF-8, or too little text for two sequences.
    pub fn read(tokenizer: &Tokenizer, paths: &[PathBuf], size: CorpusSize) -> Result<Self, TrainError> {
        let files = files(paths)?;
        let start = tokenizer.encode("", true)?;
        let wanted = size.length.saturating_mul(size.sequences);
        let mut tokens = Vec::new();
        for file in &files {
            if tokens.len() >= wanted {
                break;
            }
            let text = head(file, (wanted - tokens.len()).saturating_mul(TOKEN_BYTES))?;
            tokens.extend(tokenizer.encode(&text, false)?);
        }
        let names = paths.iter().map(|p| p.file_name().unwrap_or(p.as_os_str()).to_string_lossy().into_owned());
        Self::cut(&names.collect::<Vec<_>>().join(", "), &tokens, &start, size)
    }

    /// Generated prose, for where there is no text: sentences in whose order there is nothing to learn.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn prose(tokenizer: &Tokenizer, seed: u64, size: CorpusSize) -> Result<Self, TrainError> {
        let start = tokenizer.encode("", true)?;
        let wanted = size.length.saturating_mul(size.sequences);
        let mut prose = Prose::new(ChaCha8Rng::seed_from_u64(seed));
        let (mut tokens, mut sentences) = (Vec::new(), 0);
        while tokens.len() < wanted {
            let before = sentences;
            sentences += 500;
            let text = prose.take(sentences)[before..].chunks(6).map(|p| p.join(" ") + "\n\n").collect::<String>();
            tokens.extend(tokenizer.encode(&text, false)?);
        }
        Self::cut(&format!("generated prose {seed}"), &tokens, &start, size)
    }

    /// Cuts a stream of tokens into sequences that each begin with `start`. What is left over is dropped.
    ///
    /// # Errors
    /// Too few tokens for two sequences.
    pub fn cut(source: &str, tokens: &[u32], start: &[u32], size: CorpusSize) -> Result<Self, TrainError> {
        if size.sequences < 2 {
            return Err(TrainError::option("sequences", "must be at least 2: one to learn from, one held out"));
        }
        let body = size.length.saturating_sub(start.len()).max(1);
        if tokens.len() < 2 * body {
            let most = tokens.len() / 2 + start.len();
            let message = format!("two sequences of {} tokens need more text; {most} at most fit it", size.length);
            return Err(TrainError::option("length", message));
        }
        let sequence = |part: &[u32]| [start, part].concat();
        let sequences = tokens.chunks_exact(body).take(size.sequences).map(sequence).collect();
        Ok(Self { source: source.to_owned(), sequences })
    }

    /// The sequences.
    pub fn sequences(&self) -> &[Vec<u32>] {
        &self.sequences
    }

    /// Whether a sequence is held out from training.
    pub fn held_out(&self, sequence: usize) -> bool {
        let last = self.sequences.len() - 1;
        sequence % HELD_OUT == HELD_OUT - 1 || (last < HELD_OUT - 1 && sequence == last)
    }

    /// Tokens in all.
    pub fn tokens(&self) -> usize {
        self.sequences.iter().map(Vec::len).sum()
    }

    /// Checks that a model's context holds every sequence.
    ///
    /// # Errors
    /// A sequence that is longer.
    pub(crate) fn check_fits(&self, model: &Model) -> Result<(), TrainError> {
        let (length, most) = (self.length(), model.config().context_length);
        if length > most {
            return Err(TrainError::option("length", format!("{length} is beyond the model's context of {most}")));
        }
        Ok(())
    }

    /// Tokens of the longest sequence.
    pub fn length(&self) -> usize {
        self.sequences.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// Where the text is from, and a hash of its tokens.
    pub fn describe(&self) -> String {
        let mut hash = Sha256::new();
        for sequence in &self.sequences {
            hash.update((sequence.len() as u64).to_le_bytes());
            sequence.iter().for_each(|token| hash.update(token.to_le_bytes()));
        }
        let hash: String = hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        format!("{} ({hash})", self.source)
    }
}

/// The files of all paths, each of which has some.
fn files(paths: &[PathBuf]) -> Result<Vec<PathBuf>, TrainError> {
    let mut files = Vec::new();
    for path in paths {
        let before = files.len();
        let root = path.canonicalize().map_err(|e| TrainError::file(path, e))?;
        list(path, &root, &mut files, &mut HashSet::new())?;
        if files.len() == before {
            return Err(TrainError::file(path, "holds no .txt or .md file"));
        }
    }
    Ok(files)
}

/// The files of a path, those of a folder in the order of their names. A link may lead back to a folder that was `seen`; to one
/// that is not within `root` none is followed.
fn list(path: &Path, root: &Path, files: &mut Vec<PathBuf>, seen: &mut HashSet<PathBuf>) -> Result<(), TrainError> {
    let fail = |e: std::io::Error| TrainError::file(path, e);
    if !std::fs::metadata(path).map_err(fail)?.is_dir() {
        files.push(path.to_owned());
        return Ok(());
    }
    let folder = path.canonicalize().map_err(fail)?;
    if !folder.starts_with(root) || !seen.insert(folder) {
        return Ok(());
    }
    let entries = std::fs::read_dir(path).map_err(fail)?.collect::<Result<Vec<_>, _>>().map_err(fail)?;
    let mut paths: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        if path.is_dir() || path.extension().is_some_and(|e| e == "txt" || e == "md") {
            list(&path, root, files, seen)?;
        }
    }
    Ok(())
}

/// The first bytes of a file, up to a whole character.
fn head(path: &Path, bytes: usize) -> Result<String, TrainError> {
    let mut content = Vec::new();
    let file = std::fs::File::open(path).map_err(|e| TrainError::file(path, e))?;
    file.take(bytes as u64).read_to_end(&mut content).map_err(|e| TrainError::file(path, e))?;
    if let Err(error) = std::str::from_utf8(&content) {
        // Cut within a character: the rest of it is missing, not wrong.
        if error.error_len().is_some() || content.len() < bytes {
            return Err(TrainError::file(path, format!("is not UTF-8 from byte {} on", error.valid_up_to())));
        }
        content.truncate(error.valid_up_to());
    }
    String::from_utf8(content).map_err(|e| TrainError::file(path, e))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: CorpusSize = CorpusSize { length: 10, sequences: 20 };

    #[test]
    fn sequences_are_cut_and_every_eighth_is_held_out() {
        let tokens: Vec<u32> = (0..100).collect();
        let corpus = Corpus::cut("x", &tokens, &[7], SIZE).unwrap();
        assert_eq!((corpus.sequences().len(), corpus.tokens()), (11, 110));
        assert_eq!(corpus.sequences()[1], [7, 9, 10, 11, 12, 13, 14, 15, 16, 17]);
        let held = |n: usize| {
            let corpus = Corpus::cut("x", &tokens, &[7], CorpusSize { sequences: n, ..SIZE }).unwrap();
            (0..n).filter(|&i| corpus.held_out(i)).collect::<Vec<_>>()
        };
        assert_eq!((held(2), held(7), held(8), held(11)), (vec![1], vec![6], vec![7], vec![7]));
        let other = Corpus::cut("x", &tokens[1..], &[7], SIZE).unwrap();
        assert_ne!(corpus.describe(), other.describe());
    }

    #[test]
    fn too_little_text_says_what_fits() {
        let error = |tokens: &[u32], size| Corpus::cut("x", tokens, &[7], size).unwrap_err().to_string();
        assert!(error(&[1; 12], SIZE).contains("7 at most"));
        assert!(error(&[1; 99], CorpusSize { sequences: 1, ..SIZE }).contains("at least 2"));
        assert_eq!(Corpus::cut("x", &[1; 12], &[7], CorpusSize { length: 7, ..SIZE }).unwrap().sequences().len(), 2);
    }

    #[test]
    fn files_of_a_folder_come_by_name_and_must_be_text() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir(at("deep")).unwrap();
        std::fs::create_dir(at("pictures")).unwrap();
        for (name, text) in [("b.txt", "b"), ("a.md", "a"), ("deep/c.txt", "c"), ("d.bin", "d")] {
            std::fs::write(at(name), text).unwrap();
        }
        let files = |path: &Path| files(&[path.to_owned()]);
        assert_eq!(files(folder.path()).unwrap(), [at("a.md"), at("b.txt"), at("deep/c.txt")]);
        std::fs::write(at("b.txt"), "zwölf").unwrap();
        assert_eq!((head(&at("b.txt"), 3).unwrap(), head(&at("b.txt"), 99).unwrap()), ("zw".into(), "zwölf".into()));
        std::fs::write(at("b.txt"), b"ok\xff").unwrap();
        let error = head(&at("b.txt"), 99).unwrap_err().to_string();
        assert!(error.contains("b.txt") && error.contains("byte 2"), "{error}");
        assert!(files(&at("pictures")).unwrap_err().to_string().contains(".txt"));
        assert!(files(&at("none")).is_err());
    }

    #[cfg(unix)]
    #[test]
    fn linked_folders_are_read_once_and_only_within_what_was_given() {
        use std::os::unix::fs::symlink;
        let (folder, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let at = |name: &str| folder.path().join(name);
        std::fs::create_dir(at("deep")).unwrap();
        for file in [at("a.txt"), at("deep/b.txt"), elsewhere.path().join("c.txt")] {
            std::fs::write(file, "text").unwrap();
        }
        symlink(folder.path(), at("deep/back")).unwrap();
        symlink(folder.path(), elsewhere.path().join("back.txt")).unwrap();
        symlink(at("deep"), at("before")).unwrap();
        symlink(elsewhere.path(), at("out.txt")).unwrap();
        let found = files(&[folder.path().to_owned()]).unwrap();
        assert_eq!(found, [at("a.txt"), at("before/b.txt")]);
        assert_eq!(files(&[at("out.txt")]).unwrap(), [at("out.txt/c.txt")]);
        symlink(at("nowhere"), at("lost.txt")).unwrap();
        assert!(files(&[folder.path().to_owned()]).unwrap_err().to_string().contains("lost.txt"));
    }
}
