//! Block scores from means.
