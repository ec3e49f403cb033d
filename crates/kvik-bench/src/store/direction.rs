//! The way of the bytes: the same for a tier and for the program that it is compared with.

use std::fmt;

/// What is done with a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Put,
    Get,
}

impl Direction {
    pub(super) const ALL: [Self; 2] = [Self::Put, Self::Get];
}

impl fmt::Display for Direction {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Put => "put",
            Self::Get => "get",
        })
    }
}
