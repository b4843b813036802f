//! One sequence's attention: its spec, how far it is, its blocks, its report.

use crate::audit;
use crate::beginning::Beginning;
use crate::chunk::Underway;
use crate::layer::{AttentionShape, Rotary};
use crate::method::{Carry, DecodeMethod, PrefillLayer, PrefillMethod};
use crate::queries::Queries;
use crate::report::{AttentionUsage, PhaseReport, Report};
use crate::round::Round;
use crate::spec::{AttentionSpec, Chosen, Question};
use crate::speculate::{Choose, Speculate};
use crate::unread::Unread;
use candle_core::{Result, Tensor};
use std::sync::Arc;
use taper_kernels::kv::BLOCK_TOKENS;
use taper_kv_cache::{BlockTable, KvError, KvPool, PrefixKey};

/// The attention state of one sequence: its spec, its blocks, its report.
#[derive(Debug)]
pub struct Sequence {
    pub(crate) spec: Arc<AttentionSpec>,
    pub(crate) seed: u64,
    pub(crate) prompt: usize,
    /// Tokens of the prompt before the question; all where the question is nothing special.
    pub(crate) context: usize,
    pub(crate) len: usize,
    /// Tokens that the report has: those that were cached before the blocks were given back count once.
    pub(crate) reported: usize,
    pub(crate) table: BlockTable,
    /// Blocks of its beginning that it took over from another prompt's.
    pub(crate) taken: usize,
    /// What stands for the blocks of the context that other prompts may take over.
    pub(crate) prefix: Vec<PrefixKey>,
    /// What of its latest step the report does not have yet: see [`settle`](Self::settle).
    pub(crate) unread: Vec<Unread>,
    /// What the prefill method keeps between chunks `[layers]`; empty before the first and after the last.
    pub(crate) carries: Vec<Carry>,
    pub(crate) report: Report,
    /// A chunk that is not through the layers yet.
    pub(crate) underway: Option<Underway>,
    /// Whether the next tokens are drafts, which go by a method of their own.
    pub(crate) drafting: bool,
    /// What the next drafts of the round read.
    pub(crate) round: Round,
    /// The latest tokens' queries, where a method [chooses by them](DecodeMethod::ahead).
    pub(crate) queries: Queries,
}

/// What the choices of a row came to that is not asked for yet.
#[derive(Debug)]
pub struct Held(pub(crate) Vec<Unread>);

/// What a sequence was before its latest token, for [`Sequence::take_back`].
#[derive(Debug)]
pub struct Before {
    len: usize,
    reported: usize,
    report: Report,
}

/// What the row of a sequence's next token depends on, beside the token and what is cached.
#[derive(Debug, Clone)]
pub struct NextRow {
    spec: Arc<AttentionSpec>,
    seed: u64,
    prompt: usize,
    len: usize,
    /// Where its keys and values go.
    slot: u32,
    drafting: bool,
}

impl PartialEq for NextRow {
    fn eq(&self, other: &Self) -> bool {
        let of = |row: &Self| (row.seed, row.prompt, row.len, row.slot, row.drafting);
        Arc::ptr_eq(&self.spec, &other.spec) && of(self) == of(other)
    }
}

impl Sequence {
    /// An empty sequence whose first `prompt_tokens` tokens are attended by the spec's prefill method and the others by
    /// its decode method. `seed` keys its random draws.
    pub fn new(spec: Arc<AttentionSpec>, seed: u64, prompt_tokens: usize) -> Self {
        let report = Report::new(spec.trace.then_some(prompt_tokens));
        Self {
            spec,
            seed,
            prompt: prompt_tokens,
            context: prompt_tokens,
            len: 0,
            reported: 0,
            table: BlockTable::default(),
            taken: 0,
            prefix: Vec::new(),
            unread: Vec::new(),
            carries: Vec::new(),
            report,
            underway: None,
            drafting: false,
            round: Round::default(),
            queries: Queries::default(),
        }
    }

    /// Takes the last `tokens` tokens of the prompt as the question, which the spec may want attended otherwise.
    #[must_use]
    pub fn with_question(mut self, tokens: usize) -> Self {
        if self.spec.question != Question::Prefill {
            self.context = self.prompt.saturating_sub(tokens);
        }
        // A prompt that is a dense question from its beginning is a dense prompt, whose chunks go in slices.
        if self.spec.question == Question::Dense && self.context == 0 {
            let AttentionSpec { prefill, question, .. } = AttentionSpec::default();
            self.spec = Arc::new(AttentionSpec { prefill, question, ..(*self.spec).clone() });
            self.context = self.prompt;
        }
        self
    }

    /// Takes over what the pool remembers of the prompt's [beginning](Self::beginning), as far as the prefill method
    /// lets it, and has the pool remember the others as they come. For an empty sequence; afterwards [`len`](Self::len)
    /// tokens are cached.
    ///
    /// A prompt's last token is never taken over, since its logits are wanted.
    pub fn reuse(&mut self, pool: &mut KvPool, beginning: &Beginning) {
        let taken = beginning.taken(pool);
        self.table = pool.recall(&beginning.keys[..taken]);
        self.len = taken * BLOCK_TOKENS;
        self.taken = taken;
        self.prefix.clone_from(&beginning.keys);
    }

    /// What [`reuse`](Self::reuse) asks the pool for, by the prompt's tokens. Prompts share with those of their own `salt` alone.
    pub fn beginning(&self, prompt: &[u32], rotary: &dyn Rotary, salt: &str) -> Beginning {
        Beginning::new(&self.spec, prompt, self.context, rotary.heeds_length(), salt)
    }

    /// Tokens whose keys and values are cached.
    pub fn len(&self) -> usize {
        self.len
    }

    /// What its next token's row depends on beside the token and what is cached; none where the token takes another block.
    pub fn next_row(&self) -> Option<NextRow> {
        let room = self.len < self.table.capacity();
        let &Self { seed, prompt, len, drafting, .. } = self;
        room.then(|| NextRow { spec: self.spec.clone(), seed, prompt, len, slot: self.table.slot(len), drafting })
    }

    /// Whether nothing is cached.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Prompt tokens that the next step takes: at most `max_tokens`, unless the prefill method must see more at once, and
    /// [fewer](decode_rows) where the decode method attends for them. 0 once the prompt is done. Tokens that come a second
    /// time are not taken together with new ones. A chunk that is [underway](Self::underway) goes on.
    pub fn chunk(&self, max_tokens: usize) -> usize {
        if let Some(chunk) = &self.underway {
            return chunk.progress().0;
        }
        let max_tokens = if self.len < self.reported { max_tokens.min(self.reported - self.len) } else { max_tokens };
        match self.phase() {
            Phase::Context => self.spec.prefill.method.cut(self.len, self.context, max_tokens) - self.len,
            Phase::Question if self.attended_by() == By::Dense => (self.prompt - self.len).min(max_tokens),
            Phase::Question => (self.prompt - self.len).min(decode_rows(max_tokens)),
            Phase::Answer => 0,
        }
    }

    /// Whether the next chunk can be worked on [in slices](crate::Chunk): one of the prompt before the question.
    pub fn takes_slices(&self) -> bool {
        self.phase() == Phase::Context
    }

    /// Tokens of a [chunk](crate::Chunk) that is not through the layers yet, and how many of them through all layers its
    /// work so far amounts to; zeros without one.
    pub fn underway(&self) -> (usize, usize) {
        self.underway.as_ref().map_or((0, 0), Underway::progress)
    }

    /// What attends for the next tokens.
    pub(crate) fn attended_by(&self) -> By {
        match (self.phase(), self.spec.question) {
            (Phase::Context, _) => By::PrefillMethod,
            (Phase::Question, Question::Prefill | Question::Dense) => By::Dense,
            (Phase::Question, Question::Decode) | (Phase::Answer, _) => By::DecodeMethod,
        }
    }

    /// Whether the decode methods are the same.
    pub(crate) fn decodes_as(&self, other: &Self) -> bool {
        let (a, b) = (self.decode_method(), other.decode_method());
        Arc::ptr_eq(&a.method, &b.method) || a.name == b.name && a.json == b.json
    }

    /// Whether the next tokens' queries are kept: not those of drafts, which are let go as soon as they are checked.
    pub(crate) fn keeps_queries(&self) -> bool {
        let drafts = || self.spec.speculate.as_ref()?.method.as_ref();
        !self.drafting && (self.spec.decode.method.ahead() || drafts().is_some_and(|drafts| drafts.method.ahead()))
    }

    /// Keeps the queries `[T, q_heads, head_dim]` in one layer of the tokens from a position on, which come next, for methods that
    /// choose by the token before: of the prompt that of its last row, behind which the decode method goes on.
    pub(crate) fn keep_queries(&mut self, layer: usize, first: usize, q: &Tensor) -> Result<()> {
        if !self.keeps_queries() || layer < self.spec.decode.method.dense_layers() {
            return Ok(());
        }
        let tokens = q.dim(0)?;
        let from = match self.attended_by() {
            By::DecodeMethod => 0,
            _ if first + tokens == self.first_decoded() => tokens - 1,
            _ => return Ok(()),
        };
        // Of its own memory: those of all others would stay with it.
        self.queries.put(layer, first + from, q.narrow(0, from, tokens - from)?.force_contiguous()?);
        Ok(())
    }

    /// Position of the first token that the decode method attends for.
    pub(crate) fn first_decoded(&self) -> usize {
        if self.spec.question == Question::Decode { self.context } else { self.prompt }
    }

    /// What attends for generated tokens.
    pub(crate) fn decode_method(&self) -> &Chosen<dyn DecodeMethod> {
        match &self.spec.speculate {
            Some(Speculate { method: Some(method), .. }) if self.drafting => method,
            _ => &self.spec.decode,
        }
    }

    /// What takes in what that came to.
    pub(crate) fn decode_report(&mut self) -> &mut PhaseReport {
        if self.drafting { &mut self.report.drafts } else { &mut self.report.decode }
    }

    /// Whether somebody wants to know which keys its rows read.
    pub(crate) fn traced(&self) -> bool {
        self.spec.trace
    }

    /// Whether its token at a position is drawn for the audit, if the decode method attends for it.
    pub(crate) fn audits(&self, position: usize) -> bool {
        !self.drafting && audit::wanted(self.seed, position, self.spec.audit)
    }

    /// Whether the next generated tokens are drafts, which the spec's `speculate` attends for, until it is said otherwise: then
    /// their round is over.
    pub fn draft(&mut self, drafts: bool) {
        self.drafting = drafts;
        if !drafts {
            self.round = Round::default();
        }
    }

    /// Whether the drafts of a round keep to what the first of them chose.
    pub(crate) fn keeps_choices(&self) -> bool {
        self.drafting && self.spec.speculate.as_ref().is_some_and(|speculate| speculate.choose == Choose::Round)
    }

    /// What the next token belongs to.
    pub(crate) fn phase(&self) -> Phase {
        match self.len {
            len if len < self.context => Phase::Context,
            len if len < self.prompt => Phase::Question,
            _ => Phase::Answer,
        }
    }

    /// The blocks, for the pool to grow or release.
    pub fn table_mut(&mut self) -> &mut BlockTable {
        &mut self.table
    }

    /// The blocks.
    pub fn table(&self) -> &BlockTable {
        &self.table
    }

    /// A copy that shares the whole blocks so far, with draws of its own.
    ///
    /// # Errors
    /// [`KvError::OutOfBlocks`].
    pub fn fork(&self, pool: &mut KvPool, seed: u64) -> std::result::Result<Self, KvError> {
        let queries = self.queries.copied(None)?;
        Ok(Self { queries, ..self.copied(pool.fork(&self.table, self.len)?, self.carries.clone(), seed) })
    }

    /// A copy on other blocks, with draws of its own.
    fn copied(&self, table: BlockTable, carries: Vec<Carry>, seed: u64) -> Self {
        let (spec, report) = (self.spec.clone(), self.report.clone());
        let (prefix, unread, underway, drafting, round, queries) = Default::default();
        Self { spec, seed, table, prefix, unread, carries, report, underway, drafting, round, queries, ..*self }
    }

    /// Gives the blocks back, to [rejoin](Self::rejoin) its prompt later.
    pub fn retract(&mut self, pool: &mut KvPool) {
        self.reported = self.reported.max(self.len);
        pool.release(&mut self.table);
        self.carries.clear();
        (self.underway, self.drafting, self.round) = (None, false, Round::default());
        self.queries.cut(0);
        self.len = 0;
    }

    /// Lets sequences go on from `prompt`, which holds the same prompt or its beginning, after
    /// [`retract`](Self::retract). Tokens that come a second time are reported once; no step may take some of those together
    /// with new ones.
    ///
    /// # Errors
    /// [`KvError::OutOfBlocks`]: each but the last copies a started block.
    pub fn rejoin(sequences: Vec<&mut Self>, pool: &mut KvPool, mut prompt: Self) -> std::result::Result<(), KvError> {
        let count = sequences.len();
        let mut join = |(i, sequence): (usize, &mut Self)| {
            let queries = prompt.queries.copied(None)?;
            sequence.table = match i + 1 == count {
                true => std::mem::take(&mut prompt.table),
                false => pool.fork(&prompt.table, prompt.len)?,
            };
            (sequence.len, sequence.taken, sequence.underway) = (prompt.len, prompt.taken, None);
            sequence.queries = queries;
            Ok(())
        };
        let joined = sequences.into_iter().enumerate().try_for_each(&mut join);
        pool.release(&mut prompt.table);
        joined
    }

    /// A copy in another pool, which may be on another device.
    ///
    /// # Errors
    /// [`KvError::OutOfBlocks`], a pool for another model, or a prompt that is not all cached.
    pub fn move_to(&self, from: &KvPool, to: &mut KvPool, seed: u64) -> std::result::Result<Self, KvError> {
        if self.len < self.context {
            let message = format!("{} of {} prompt tokens are cached; the rest comes first", self.len, self.context);
            return Err(candle_core::Error::Msg(message).into());
        }
        let there = to.layer(0).k;
        let queries = self.queries.copied(Some((there.device(), there.dtype())))?;
        Ok(Self { queries, ..self.copied(to.adopt(from, &self.table, self.len)?, Vec::new(), seed) })
    }

    /// From here on tokens are attended by the decode method of `spec`, and audited as often as it says.
    pub fn decode_by(&mut self, spec: &AttentionSpec) {
        self.change(|own| (own.decode, own.audit) = (spec.decode.clone(), spec.audit));
    }

    /// From here on tokens are attended by a decode method that is in no registry, and goes by a name of its own.
    pub fn decode_by_own(&mut self, name: &'static str, method: Arc<dyn DecodeMethod>) {
        self.change(|own| own.decode = Chosen { name, json: serde_json::json!({ "method": name }), method });
    }

    /// From here on what attends for tokens goes around the decode method, by whose name and parameters it is known.
    pub fn decode_around(&mut self, around: impl FnOnce(Arc<dyn DecodeMethod>) -> Arc<dyn DecodeMethod>) {
        self.change(|own| own.decode.method = around(own.decode.method.clone()));
    }

    /// As [`decode_by_own`](Self::decode_by_own), of a prompt's prefill method.
    pub fn prefill_by_own(&mut self, name: &'static str, method: Arc<dyn PrefillMethod>) {
        self.change(|own| own.prefill = Chosen { name, json: serde_json::json!({ "method": name }), method });
    }

    /// A spec of its own from here on.
    fn change(&mut self, change: impl FnOnce(&mut AttentionSpec)) {
        change(Arc::make_mut(&mut self.spec));
    }

    /// Lets the tokens after the first `tokens` go, as if they had never come. Those of the prompt stay.
    ///
    /// # Errors
    /// [`KvError::OutOfBlocks`] if a shared block must be copied and there is none.
    pub fn truncate(&mut self, pool: &mut KvPool, tokens: usize) -> std::result::Result<(), KvError> {
        let tokens = tokens.clamp(self.prompt.min(self.len), self.len);
        pool.truncate(&mut self.table, tokens)?;
        (self.len, self.underway, self.round) = (tokens, None, Round::default());
        self.queries.cut(tokens);
        self.unread.clear();
        self.reported = self.reported.min(tokens);
        self.report.truncate(tokens);
        Ok(())
    }

    /// What it is now, to be that again if the next generated token has to be taken back.
    pub fn before(&self) -> Before {
        Before { len: self.len, reported: self.reported, report: self.report.clone() }
    }

    /// Lets a token go whose step failed after it was taken as cached, its report with it.
    ///
    /// # Errors
    /// As [`truncate`](Self::truncate).
    pub fn take_back(&mut self, pool: &mut KvPool, before: Before) -> std::result::Result<(), KvError> {
        self.truncate(pool, before.len)?;
        (self.reported, self.report) = (before.reported, before.report);
        Ok(())
    }

    /// One layer of a prompt's rows with queries `[T, q_heads, head_dim]`, the first `row` tokens after those cached.
    pub(crate) fn prompt_layer<'s>(
        &'s self,
        shape: &AttentionShape,
        pool: &'s KvPool,
        layer: usize,
        (q, row): (Tensor, usize),
    ) -> PrefillLayer<'s> {
        PrefillLayer {
            q,
            kv: pool.layer(layer),
            table: self.table.blocks(),
            layer,
            start: self.len + row,
            prompt: self.context,
            window: shape.window,
        }
    }

    /// Takes the next tokens as cached, and the report with them unless they come a second time.
    pub(crate) fn advance(&mut self, pool: &mut KvPool, tokens: usize, report: Report) {
        if self.go_on(pool, tokens) {
            self.report = report;
        }
    }

    /// Takes the next tokens as cached; whether the report is to have them.
    pub(crate) fn go_on(&mut self, pool: &mut KvPool, tokens: usize) -> bool {
        let before = self.len;
        self.len += tokens;
        let new = self.len > self.reported;
        if !new {
            self.unread.clear();
        }
        if before < self.context {
            let whole = self.len.min(self.context) / BLOCK_TOKENS;
            match self.stands_on_what_is_remembered(pool) {
                true => pool.remember(&self.table, &self.prefix[..whole.min(self.prefix.len())], before / BLOCK_TOKENS),
                false => pool.forget(&self.table, self.taken),
            }
        }
        if self.len >= self.context {
            self.carries.clear();
        }
        new
    }

    /// Whether the blocks that it took over may still be taken over: they are forgotten where the request that computed them has
    /// failed, and what was computed from them is then nobody else's either.
    fn stands_on_what_is_remembered(&self, pool: &KvPool) -> bool {
        let (blocks, keys) = (self.table.blocks().get(..self.taken), self.prefix.get(..self.taken));
        let last = blocks.zip(keys).and_then(|(blocks, keys)| blocks.last().zip(keys.last()));
        last.is_none_or(|(&block, key)| pool.remembers(block, key))
    }

    /// Takes the next token as cached, whose row was attended [ahead](crate::AttentionBatch::hold) and there is room for.
    pub fn follow(&mut self, pool: &mut KvPool, held: Held) {
        self.unread = held.0;
        self.go_on(pool, 1);
    }

    /// Takes into the reports what was put off, of all sequences or, on an error, of none: the device is waited for once a step,
    /// at its end.
    ///
    /// # Errors
    /// The device's.
    pub fn settle<'a>(sequences: impl IntoIterator<Item = &'a mut Self>) -> Result<()> {
        let settled = |sequence: &'a mut Self| -> Result<(&'a mut Self, PhaseReport)> {
            let mut report = sequence.decode_report().clone();
            sequence.unread.iter().try_for_each(|unread| unread.add_to(&mut report))?;
            if let Some(trace) = &mut report.trace {
                trace.settle();
            }
            Ok((sequence, report))
        };
        for (sequence, report) in sequences.into_iter().map(settled).collect::<Result<Vec<_>>>()? {
            sequence.unread.clear();
            *sequence.decode_report() = report;
        }
        Ok(())
    }

    /// Takes so many drafts, of which some were right, into the report; all of them were looked up or none.
    pub fn drafted(&mut self, drafts: u64, right: u64, looked_up: bool) {
        self.report.drafted(drafts, right, looked_up);
    }

    /// What attention came to so far.
    pub fn usage(&self) -> AttentionUsage {
        self.report.usage(&self.spec, self.seed)
    }
}

/// How many tokens of a question, or of an answer that comes again, go with the work of `tokens` tokens of a prompt where the
/// decode method attends for them: each reads the keys by itself, and a prompt's tokens read them together.
pub fn decode_rows(tokens: usize) -> usize {
    (tokens / 16).clamp(1, 16)
}

/// The parts of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Phase {
    Context,
    Question,
    Answer,
}

/// What attends for tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    /// The spec's prefill method.
    PrefillMethod,
    /// Dense attention of a prompt.
    Dense,
    /// The spec's decode method.
    DecodeMethod,
}
