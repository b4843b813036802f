//! Prose for haystacks: seeded sentences from templates, so that no model can have read them.

use rand::Rng;
use rand::seq::IndexedRandom;

/// A prose that goes on for as long as it is asked; equal generators give equal sentences.
pub struct Prose<R> {
    rng: R,
    sentences: Vec<String>,
}

impl<R: Rng> Prose<R> {
    /// A prose that is drawn from `rng`.
    pub fn new(rng: R) -> Self {
        Self { rng, sentences: Vec::new() }
    }

    /// The first `count` sentences.
    pub fn take(&mut self, count: usize) -> &[String] {
        while self.sentences.len() < count {
            let template = pick(&mut self.rng, SENTENCES);
            let mut text = fill(&mut self.rng, template);
            if let Some(first) = text.get_mut(..1) {
                first.make_ascii_uppercase();
            }
            self.sentences.push(text);
        }
        &self.sentences[..count]
    }
}

fn pick(rng: &mut impl Rng, from: &[&'static str]) -> &'static str {
    from.choose(rng).copied().unwrap_or_default()
}

/// Replaces each `{slot}` by a drawn text, which may have slots of its own.
fn fill(rng: &mut impl Rng, template: &str) -> String {
    let mut out = String::new();
    let mut rest = template;
    while let Some((before, after)) = rest.split_once('{') {
        out.push_str(before);
        let (slot, after) = after.split_once('}').unwrap_or((after, ""));
        let choice = SLOTS.iter().find(|(name, _)| *name == slot).map_or("", |(_, from)| pick(rng, from));
        out.push_str(&fill(rng, choice));
        rest = after;
    }
    out.push_str(rest);
    out
}

const SENTENCES: &[&str] = &[
    "{when}, {who} {did}.",
    "{who} {did}, and {who} {did} {when}.",
    "{who} {did} because {clause}.",
    "although {clause}, {who} {did}.",
    "while {who} {was}, {who} {did}.",
    "if {clause}, nobody in {place} noticed it.",
    "there was a {adjective} {thing} {where}, and {clause}.",
    "it took {span} before {who} {did}.",
    "nobody knew why {who} {did}, but {clause}.",
    "{who} said that {clause}, which surprised {who}.",
    "the {adjective} {thing} {where} belonged to {who}, who {did} {when}.",
    "{when} the {weather}, so {who} stayed {where} and {did}.",
    "what {who} remembered best was the {adjective} {thing} {where}.",
    "after {span} of waiting, {who} {did} without a word.",
    "people in {place} still tell how {who} {did}.",
    "most {people} believe that {truth}, yet {truth}.",
    "the trouble with {abstract} is that {truth}.",
    "{abstract} and {abstract} are easy to confuse, for {truth}.",
    "you learn about {abstract} only when {clause}.",
    "a good {thing} is like {abstract}: {truth}.",
    "{who} wrote in a letter that {abstract} mattered less than a {adjective} {thing}.",
    "one of the {people} {was}, another {did}, and the rest went home.",
    "no map showed {place}, though {who} {did} there {when}.",
    "{who} asked {who} about the {thing}, but the answer was {adjective} and short.",
    "as long as {who} {was}, the {thing} {where} was safe.",
    "in {place} the {people} spoke of {abstract} as others speak of the weather.",
    "every morning {who} walked past the {thing} {where} and thought of {abstract}.",
    "the story of the {adjective} {thing} begins {where}, {span} before {who} was born.",
    "{who} {did}; {who} only smiled.",
    "to {who}, {abstract} was a {adjective} {thing} that somebody had left {where}.",
];

/// Slots and what they draw from.
const SLOTS: &[(&str, &[&str])] = &[
    (
        "when",
        &[
            "in the first week of spring",
            "on a cold evening",
            "long before the harvest",
            "after the second bell",
            "at the end of that summer",
            "one rainy afternoon",
            "during the night",
            "shortly before noon",
            "when the market had closed",
            "in the year of the great flood",
            "on the last day of the fair",
            "at dawn",
            "some time later",
            "before the snow came",
            "on the way back",
            "between two storms",
        ],
    ),
    (
        "who",
        &[
            "the baker",
            "an old fisherman",
            "Marta",
            "the schoolteacher",
            "Ilya",
            "her youngest brother",
            "the innkeeper",
            "a travelling clockmaker",
            "Benedikt",
            "the widow from the mill",
            "one student",
            "the ferryman",
            "Oona",
            "the new doctor",
            "a boy with a lantern",
            "Teodor",
            "the village council",
            "my grandmother",
            "the gardener",
            "a woman in a grey coat",
            "Rosalind",
            "the captain",
            "an apprentice",
            "Hanne",
            "the postman",
            "Ambrose",
            "the librarian",
            "a stranger",
            "Pilar",
            "the night watchman",
        ],
    ),
    (
        "was",
        &[
            "was mending the roof",
            "was asleep by the stove",
            "was counting the {things}",
            "was looking for a {thing}",
            "was arguing with {who}",
            "was painting the {thing}",
            "was on the road to {place}",
            "was singing in the kitchen",
            "was reading aloud",
            "was waiting {where}",
        ],
    ),
    (
        "did",
        &[
            "carried the {thing} to {place}",
            "sold a {adjective} {thing} to {who}",
            "repaired the {thing} {where}",
            "found a {adjective} {thing} {where}",
            "planted a row of {things} {where}",
            "forgot the {thing} {where}",
            "told {who} about {place}",
            "painted the {things} in {adjective} colours",
            "hid the {thing} {where}",
            "borrowed a {thing} from {who}",
            "counted the {things} {where}",
            "walked to {place} with {who}",
            "drew a {adjective} {thing} on the wall",
            "gave every child a {thing}",
            "wrote a long letter about {abstract}",
            "put the {thing} back {where}",
            "looked for {who} {where}",
            "built a {adjective} {thing} out of old {things}",
            "left {place} with a {thing} and three {things}",
            "learned to make {things} from {who}",
        ],
    ),
    (
        "where",
        &[
            "by the river",
            "under the stairs",
            "behind the chapel",
            "in the back room",
            "near the old bridge",
            "on the upper floor",
            "at the edge of the forest",
            "beside the well",
            "in a drawer",
            "on the kitchen table",
            "at the harbour",
            "in the orchard",
            "across the square",
            "in the attic",
            "along the canal",
        ],
    ),
    (
        "place",
        &[
            "the next valley",
            "the town on the hill",
            "the harbour quarter",
            "Lindenau",
            "the island",
            "the southern coast",
            "the monastery",
            "Veldmark",
            "the upper village",
            "the railway station",
            "the capital",
            "Orrest",
            "the border",
            "the old quarry",
            "the market hall",
            "Saint Brannoc",
        ],
    ),
    (
        "thing",
        &[
            "kettle",
            "wooden chest",
            "bicycle",
            "brass lamp",
            "violin",
            "ladder",
            "mirror",
            "basket",
            "clock",
            "blanket",
            "painting",
            "wheelbarrow",
            "map",
            "teapot",
            "rope",
            "notebook",
            "window",
            "stove",
            "boat",
            "saddle",
            "loom",
            "telescope",
            "chair",
            "bell",
            "coat",
            "birdcage",
            "sign",
            "garden gate",
            "cart",
            "piano",
        ],
    ),
    (
        "things",
        &[
            "apples",
            "candles",
            "letters",
            "nails",
            "roof tiles",
            "books",
            "bottles",
            "cherry trees",
            "chairs",
            "coins",
            "barrels",
            "boots",
            "cups",
            "feathers",
            "stamps",
            "lanterns",
            "maps",
            "seeds",
            "shells",
            "spoons",
        ],
    ),
    (
        "adjective",
        &[
            "narrow",
            "heavy",
            "forgotten",
            "bright",
            "crooked",
            "small",
            "handsome",
            "cheap",
            "curious",
            "broken",
            "warm",
            "faded",
            "useful",
            "strange",
            "quiet",
            "plain",
            "splendid",
            "rusty",
            "careful",
            "pale",
        ],
    ),
    (
        "weather",
        &[
            "wind turned",
            "rain did not stop",
            "fog came in from the sea",
            "sun shone on the roofs",
            "frost broke the pipes",
            "river rose",
            "heat was hard to bear",
            "snow lay knee deep",
        ],
    ),
    (
        "span",
        &["an hour", "three days", "half a year", "a whole winter", "two weeks", "most of a morning", "ten years"],
    ),
    (
        "clause",
        &[
            "{who} {was}",
            "{who} {did}",
            "the {weather}",
            "the {thing} {where} was {adjective}",
            "nobody had seen the {thing} since {who} {did}",
            "{who} had never been to {place}",
            "the {people} wanted a {adjective} {thing}",
            "{abstract} was not what {who} had expected",
        ],
    ),
    (
        "people",
        &[
            "farmers",
            "carpenters",
            "children",
            "painters",
            "merchants",
            "neighbours",
            "sailors",
            "musicians",
            "travellers",
            "teachers",
        ],
    ),
    (
        "abstract",
        &[
            "patience",
            "memory",
            "luck",
            "courage",
            "curiosity",
            "good work",
            "silence",
            "friendship",
            "habit",
            "fame",
            "honesty",
            "doubt",
            "ambition",
            "craft",
            "freedom",
        ],
    ),
    (
        "truth",
        &[
            "it cannot be bought",
            "it grows when nobody looks",
            "those who have it seldom speak of it",
            "it is worth more than a {adjective} {thing}",
            "most of us find it by accident",
            "it ends where {abstract} begins",
            "it looks simple from far away",
            "{who} had more of it than anyone",
            "one has to begin again every day",
            "it comes late and leaves early",
            "even {people} lose it sometimes",
            "it asks for {abstract} first",
        ],
    ),
];

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;
    use rand_chacha::ChaCha8Rng;
    use std::collections::HashSet;

    fn prose(seed: u64) -> Prose<ChaCha8Rng> {
        Prose::new(ChaCha8Rng::seed_from_u64(seed))
    }

    #[test]
    fn every_slot_has_words() {
        let texts = SENTENCES.iter().chain(SLOTS.iter().flat_map(|(_, from)| *from));
        for text in texts {
            for part in text.split('{').skip(1) {
                let (slot, _) = part.split_once('}').expect("closed");
                assert!(SLOTS.iter().any(|(name, _)| *name == slot), "{slot} in {text}");
            }
        }
    }

    #[test]
    fn it_is_the_same_prose_however_it_is_asked() {
        let long = prose(3).take(500).to_vec();
        let mut other = prose(3);
        other.take(7);
        assert_eq!(other.take(500), long);
        assert_ne!(prose(4).take(500), long);
    }

    #[test]
    fn sentences_are_whole_and_vary() {
        let text = prose(1).take(2000).to_vec();
        for sentence in &text {
            assert!(sentence.ends_with('.') && sentence.starts_with(|c: char| c.is_ascii_uppercase()), "{sentence}");
            assert!(!sentence.contains(['{', '}', '\n']) && !sentence.contains("  "), "{sentence}");
            assert!(!sentence.contains("magic") && !sentence.bytes().any(|b| b.is_ascii_digit()), "{sentence}");
        }
        assert!(text.iter().collect::<HashSet<_>>().len() > 1950);
    }
}
