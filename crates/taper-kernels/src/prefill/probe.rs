//! Hierarchy.
