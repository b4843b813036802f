//! How an answer is scored.

/// Share of the wanted strings that the answer contains, letter case aside: RULER's `string_match_all`, which it uses
/// for every task here. (Its `string_match_part`, one match suffices, is for question answering only.)
///
/// 1 if nothing is wanted.
pub fn share_found(answer: &str, wanted: &[String]) -> f64 {
    if wanted.is_empty() {
        return 1.0;
    }
    let answer = answer.to_lowercase();
    let found = wanted.iter().filter(|want| answer.contains(&want.to_lowercase())).count();
    found as f64 / wanted.len() as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_wanted_string_counts_alike() {
        let wanted = ["1234567".to_owned(), "Quiet-Lake".to_owned()];
        assert_eq!(share_found("they are 1234567 and quiet-lake.", &wanted), 1.0);
        assert_eq!(share_found("they are 1234567 and 1234567.", &wanted), 0.5);
        assert_eq!(share_found("123456", &wanted), 0.0);
        assert_eq!(share_found("", &wanted), 0.0);
        assert_eq!(share_found("anything", &[]), 1.0);
    }
}
