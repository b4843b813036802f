use super::*;
use proptest::prelude::*;
use std::collections::HashSet;

/// Every three bytes are a token.
struct Threes;

impl PromptText for Threes {
    fn prompt(&self, user: &str, prefix: &str) -> Result<Vec<u32>, EvalError> {
        Ok((0..(user.len() + prefix.len()).div_ceil(3) as u32).collect())
    }

    fn decode(&self, _: &[u32]) -> String {
        String::new()
    }

    fn ends(&self, _: u32) -> bool {
        true
    }
}

fn sample(task: Task, length: usize, seed: u64, index: usize) -> Sample {
    task.sample(length, seed, index, &Threes).unwrap()
}

fn tasks() -> impl Strategy<Value = Task> {
    prop::sample::select(Task::ALL.to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_question_is_as_long_as_asked(task in tasks(), length in 4000usize..20_000, seed: u64, index in 0usize..9) {
        let made = sample(task, length, seed, index);
        let (tokens, limit) = (made.tokens.len(), length - task.answer_tokens());
        // A line of two UUIDs is 45 tokens here; one more common word is three entries of the list.
        let line = 46;
        let question = made.user.len() - made.user.rfind("\n").unwrap() + made.prefix.len();
        prop_assert!(made.question_tokens.abs_diff(question / 3) <= 2, "{} of {question}", made.question_tokens);
        prop_assert!(tokens <= limit && tokens + line.max(limit / 100) >= limit, "{tokens} of {limit}");
    }

    #[test]
    fn equal_arguments_give_equal_questions(task in tasks(), seed: u64, index in 0usize..9) {
        let made = sample(task, 5000, seed, index);
        prop_assert_eq!(&made, &sample(task, 5000, seed, index));
        prop_assert_ne!(&made.wanted, &sample(task, 5000, seed, index + 1).wanted);
        prop_assert_ne!(&made.wanted, &sample(task, 5000, seed.wrapping_add(1), index).wanted);
    }

    #[test]
    fn every_wanted_string_is_in_the_context_and_only_as_often_as_asked(task in tasks(), seed: u64) {
        let Sample { user, wanted, prefix, .. } = sample(task, 6000, seed, 0);
        prop_assert_eq!(wanted.iter().collect::<HashSet<_>>().len(), wanted.len());
        for want in &wanted {
            let count = user.matches(want.as_str()).count();
            let right = match task {
                // Assigned, and but for the last one read.
                Task::VariableTracking => (1..=2).contains(&count),
                Task::CommonWords => count == 30,
                Task::FrequentWords => count > 10,
                _ => count == 1,
            };
            prop_assert!(right, "{want} stands {count} times");
            prop_assert!(!prefix.contains(want.as_str()), "the prefix gives the answer away");
        }
    }
}

fn needles(task: Task) -> (Sample, Vec<String>) {
    let made = sample(task, 6000, 7, 0);
    let needles = made.user.match_indices("One of the special magic ").map(|(at, _)| {
        let rest = &made.user[at..];
        rest[..=rest.find('.').unwrap()].to_owned()
    });
    let needles = needles.collect();
    (made, needles)
}

#[test]
fn each_task_has_its_needles() {
    let plain = [(Task::Single1, 1, 1), (Task::Single2, 1, 1), (Task::Single3, 1, 1), (Task::MultiKey1, 4, 1)];
    for (task, count, wanted) in plain.into_iter().chain([(Task::MultiValue, 4, 4), (Task::MultiQuery, 4, 4)]) {
        let (made, needles) = needles(task);
        assert_eq!((needles.len(), made.wanted.len()), (count, wanted), "{task}");
        for want in &made.wanted {
            assert_eq!(needles.iter().filter(|needle| needle.contains(want.as_str())).count(), 1, "{task}");
        }
    }
    for (task, wanted_length) in [(Task::MultiKey2, 7), (Task::MultiKey3, 36)] {
        let (made, needles) = needles(task);
        assert!(needles.len() > 50 && made.wanted[0].len() == wanted_length, "{task}");
        let key = |needle: &String| needle.split(" for ").nth(1).unwrap().split(" is: ").next().unwrap().to_owned();
        assert_eq!(needles.iter().map(key).collect::<HashSet<_>>().len(), needles.len(), "{task}: keys differ");
    }
}

#[test]
fn the_question_names_the_key_of_the_wanted_value() {
    for task in [Task::Single1, Task::Single3, Task::MultiKey1, Task::MultiKey2, Task::MultiKey3] {
        let (made, needles) = needles(task);
        let needle = needles.iter().find(|needle| needle.contains(&made.wanted[0])).unwrap();
        let key = needle.split(" for ").nth(1).unwrap().split(" is: ").next().unwrap();
        let value = if made.wanted[0].len() == 7 { "number" } else { "uuid" };
        let question = format!("\nWhat is the special magic {value} for {key} mentioned in the provided text?");
        assert!(made.user.ends_with(&question), "{task}: {key}");
        assert_eq!(made.prefix, format!(" The special magic {value} for {key} mentioned in the provided text is"));
    }
    let (made, needles) = needles(Task::MultiQuery);
    let keys: Vec<&str> = made
        .wanted
        .iter()
        .map(|want| needles.iter().find(|needle| needle.contains(want.as_str())).unwrap())
        .map(|needle| needle.split(" for ").nth(1).unwrap().split(" is: ").next().unwrap())
        .collect();
    let listed = format!("{}, {}, {}, and {}", keys[0], keys[1], keys[2], keys[3]);
    assert!(made.user.ends_with(&format!("numbers for {listed} mentioned in the provided text?")));
}

#[test]
fn a_chain_is_in_order_and_all_asked_for() {
    let made = sample(Task::VariableTracking, 4000, 3, 0);
    let value = made.user.rsplit("assigned the value ").next().unwrap().split(' ').next().unwrap();
    let mut expected = vec![format!("VAR {} = {value}", made.wanted[0])];
    expected.extend(made.wanted.windows(2).map(|pair| format!("VAR {} = VAR {}", pair[1], pair[0])));
    let places: Vec<usize> = expected.iter().map(|line| made.user.find(line.as_str()).expect("there")).collect();
    assert!(places.is_sorted() && made.wanted.len() == 5);
    assert!(made.prefix.ends_with("are: "));
}

#[test]
fn common_words_are_ten_times_as_common() {
    let made = sample(Task::CommonWords, 12_000, 5, 0);
    let list = made.user.lines().nth(1).unwrap();
    let mut counts = std::collections::HashMap::new();
    for word in list.split(' ').filter(|word| !word.ends_with('.')) {
        *counts.entry(word).or_insert(0) += 1;
    }
    for (word, count) in counts {
        assert_eq!(count, if made.wanted.iter().any(|want| want == word) { 30 } else { 3 }, "{word}");
    }
}

#[test]
fn frequent_words_come_in_order_behind_the_dots() {
    let made = sample(Task::FrequentWords, 12_000, 5, 0);
    let count = |word: &str| made.user.split(' ').filter(|w| *w == word).count();
    let counts = [count("..."), count(&made.wanted[0]), count(&made.wanted[1]), count(&made.wanted[2])];
    assert!(counts.is_sorted_by(|a, b| a > b), "{counts:?}");
}

#[test]
fn a_length_without_room_is_refused_with_about_the_least_that_has_it() {
    for task in Task::ALL {
        let error = task.sample(150, 1, 0, &Threes).unwrap_err();
        let EvalError::Length { least, .. } = error else { panic!("{error}") };
        // Another length asks another question, of nearly as many tokens.
        task.sample(least + 40, 1, 0, &Threes).unwrap_or_else(|error| panic!("{error}"));
        assert!(task.sample(0, 1, 0, &Threes).is_err());
    }
}

#[test]
fn names_go_both_ways() {
    for task in Task::ALL {
        assert_eq!(task.name().parse::<Task>().unwrap(), task);
        let json = serde_json::to_string(&task).unwrap();
        assert_eq!((json.clone(), serde_json::from_str::<Task>(&json).unwrap()), (format!("\"{task}\""), task));
    }
    let error = "multikey3".parse::<Task>().unwrap_err().to_string();
    assert!(error.contains("did you mean multikey_3?") && error.contains("frequent_words"), "{error}");
}
