//! The hash ring.
//!
//! Positions are numbers on a circle. Each member has virtual nodes on it, as many as its weight
//! says, and a key belongs to the first virtual node at or after its own position. Virtual node
//! `n` of member `id` lies where the key `id#n` lies, `n` in decimal from 0. A member of less weight
//! has the first of the same virtual nodes, so a change of weight moves keys only from or to the
//! member whose weight changes.
//!
//! Members are addressed by their place in the order of their ids.

mod choice;
mod hash;

pub(crate) use choice::Bounds;
pub use choice::{Candidate, Choice, Explanation, Loads, Reason, Skip, choose, explain};
pub use hash::RingHash;

/// Most virtual nodes of one member. Beyond this, more of them no longer even out the shares and
/// only cost memory: a weight from a hostile message must not take all of it.
pub const MAX_VIRTUAL_NODES: u32 = 1 << 16;

/// Why a ring cannot be built.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// A weight is negative, not finite, or gives more than [`MAX_VIRTUAL_NODES`].
    #[error("weight of `{id}` is {weight}; allowed: 0 to {max}")]
    InvalidWeight {
        /// The member.
        id: String,
        /// Its weight.
        weight: f64,
        /// The largest weight this ring takes.
        max: f64,
    },
    /// Two members have one id.
    #[error("member `{id}` is listed twice; allowed: each id once")]
    DuplicateMember {
        /// The id.
        id: String,
    },
}

/// Members on a circle of positions.
#[derive(Debug, Clone, PartialEq)]
pub struct Ring {
    hash: RingHash,
    /// By id.
    members: Vec<String>,
    /// Of each member.
    n_virtual_nodes: Vec<u32>,
    /// Of all virtual nodes, rising.
    positions: Box<[u64]>,
    /// The member of the virtual node at the same place in `positions`.
    owners: Box<[u32]>,
    /// Members with at least one virtual node.
    n_placed: usize,
}

/// The distinct members clockwise from a key; see [`Ring::walk`].
#[derive(Debug, Clone)]
pub struct Walk<'a> {
    ring: &'a Ring,
    /// The next virtual node to look at.
    next: usize,
    /// Members that are still to come.
    n_left: usize,
    seen: Seen,
}

/// The members that a walk has passed.
#[derive(Debug, Clone)]
enum Seen {
    /// Up to 64 members: a walk does not allocate.
    Word(u64),
    Words(Box<[u64]>),
}

// === impl Ring ===

impl Ring {
    /// Builds the ring of `members`, given as id and weight in any order.
    ///
    /// A weight `w` gives `round(w * virtual_nodes_per_weight)` virtual nodes, at least one if
    /// `w > 0` and none if `w = 0`. Virtual nodes at one position are ordered by the members' ids.
    ///
    /// # Errors
    /// If a weight is negative, not finite or too large, or an id is listed twice.
    pub fn build<S: AsRef<str>>(
        hash: RingHash,
        virtual_nodes_per_weight: u32,
        members: &[(S, f64)],
    ) -> Result<Self, RingError> {
        let mut sorted: Vec<(&str, f64)> =
            members.iter().map(|(id, weight)| (id.as_ref(), *weight)).collect();
        sorted.sort_by(|left, right| left.0.cmp(right.0));
        if let Some(pair) = sorted.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(RingError::DuplicateMember { id: pair[0].0.to_owned() });
        }
        let n_virtual_nodes = sorted
            .iter()
            .map(|&(id, weight)| virtual_nodes_of(id, weight, virtual_nodes_per_weight))
            .collect::<Result<Vec<_>, _>>()?;

        let mut nodes = Vec::with_capacity(n_virtual_nodes.iter().map(|&n| n as usize).sum());
        let mut key = String::new();
        for (member, (&(id, _), &n_nodes)) in (0_u32..).zip(sorted.iter().zip(&n_virtual_nodes)) {
            for number in 0..n_nodes {
                use std::fmt::Write as _;
                key.clear();
                // Writing to a string cannot fail.
                let _ = write!(key, "{id}#{number}");
                nodes.push((hash.position(key.as_bytes()), member));
            }
        }
        nodes.sort_unstable();
        Ok(Self {
            hash,
            members: sorted.iter().map(|&(id, _)| id.to_owned()).collect(),
            n_placed: n_virtual_nodes.iter().filter(|&&n| n > 0).count(),
            n_virtual_nodes,
            positions: nodes.iter().map(|&(position, _)| position).collect(),
            owners: nodes.iter().map(|&(_, member)| member).collect(),
        })
    }

    /// Returns the ids of all members in their order, those without a virtual node included.
    pub fn members(&self) -> &[String] {
        &self.members
    }

    /// Returns the place of the member `id` in [`Ring::members`].
    pub fn member(&self, id: &str) -> Option<usize> {
        self.members.binary_search_by(|member| member.as_str().cmp(id)).ok()
    }

    /// Returns the hash function that places keys.
    pub fn hash(&self) -> RingHash {
        self.hash
    }

    /// Returns where `key` lies on the ring.
    pub fn position(&self, key: &[u8]) -> u64 {
        self.hash.position(key)
    }

    /// Visits the distinct members clockwise from `key`: first its owner, then the member that would own it if
    /// the ones before did not exist. Members without a virtual node are not visited.
    ///
    /// Does not allocate for up to 64 members.
    pub fn walk(&self, key: &[u8]) -> Walk<'_> {
        let position = self.position(key);
        let seen = if self.members.len() <= u64::BITS as usize {
            Seen::Word(0)
        } else {
            Seen::Words(vec![0; self.members.len().div_ceil(u64::BITS as usize)].into())
        };
        Walk {
            ring: self,
            next: self.positions.partition_point(|&node| node < position),
            n_left: self.n_placed,
            seen,
        }
    }

    /// Returns the share of all positions that each member owns; they add up to 1 unless the ring
    /// is empty.
    pub fn shares(&self) -> Vec<f64> {
        let mut shares = vec![0.0; self.members.len()];
        let Some(&last) = self.positions.last() else { return shares };
        let circle = self.hash.circle();
        // The first virtual node also owns what lies behind the last one.
        let mut before = u128::from(last);
        for (&position, &owner) in self.positions.iter().zip(&self.owners) {
            let position = u128::from(position);
            let arc = if position < before { position + circle - before } else { position - before };
            shares[owner as usize] += arc as f64 / circle as f64;
            before = position;
        }
        // A lone virtual node is its own predecessor: the arc is the whole circle, not nothing.
        if self.positions.first() == Some(&last) {
            shares[self.owners[0] as usize] = 1.0;
        }
        shares
    }

    /// Returns the number of virtual nodes of a member; 0 for a place that no member has.
    pub fn virtual_nodes(&self, member: usize) -> u32 {
        self.n_virtual_nodes.get(member).copied().unwrap_or(0)
    }
}

// === impl Walk ===

impl Iterator for Walk<'_> {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        if self.n_left == 0 {
            return None;
        }
        loop {
            if self.next >= self.ring.owners.len() {
                self.next = 0;
            }
            let member = self.ring.owners[self.next] as usize;
            self.next += 1;
            if self.seen.insert(member) {
                self.n_left -= 1;
                return Some(member);
            }
        }
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.n_left, Some(self.n_left))
    }
}

impl ExactSizeIterator for Walk<'_> {}

impl Seen {
    /// Adds `member`; says whether it is new.
    fn insert(&mut self, member: usize) -> bool {
        let (word, bit) = match self {
            Self::Word(word) => (word, 1 << member),
            Self::Words(words) => (&mut words[member / 64], 1 << (member % 64)),
        };
        let is_new = *word & bit == 0;
        *word |= bit;
        is_new
    }
}

fn virtual_nodes_of(id: &str, weight: f64, per_weight: u32) -> Result<u32, RingError> {
    let wanted = (weight * f64::from(per_weight)).round();
    if !weight.is_finite() || weight < 0.0 || wanted > f64::from(MAX_VIRTUAL_NODES) {
        let max = f64::from(MAX_VIRTUAL_NODES) / f64::from(per_weight.max(1));
        return Err(RingError::InvalidWeight { id: id.to_owned(), weight, max });
    }
    Ok(if weight > 0.0 { (wanted as u32).max(1) } else { 0 })
}
