//! What the tests of exactness share.

pub mod kinds;
pub mod properties;
mod suite;
