//! `taper bench`: methods side by side, steps of a model beside their floor, load on a server.

pub mod methods;
pub mod model;
pub mod serve;
