//! Reads of chunks that peers are known to have.
//!
//! All requests are sent before the first answer is awaited, so that the peers send at the same time. A read of many bytes is shared
//! out among the connections to a peer that nothing else uses: one connection is as fast as one processor on either side.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use super::PeerTier;
use super::frame::MAX_ITEMS;
use super::locations::PeerId;
use super::parts::{Part, SHARE_BYTES, shared_out};
use super::peer::{Borrowed, Peer};
use crate::decorator::{Permit, Verdict};
use crate::error::TierError;
use crate::tier::{GetItem, GetOutcome};

/// What one peer is asked for.
struct PeerRead<'a> {
    peer: &'a Arc<Peer>,
    permit: Permit<'a>,
    n_bytes: u64,
    shares: Vec<Share<'a>>,
}

/// What comes over one connection.
struct Share<'a> {
    borrowed: Borrowed,
    parts: Vec<Part<'a>>,
    failure: Option<TierError>,
}

impl PeerTier {
    /// Asks one peer for each item that is open; `tried` says which peers an item was asked of already. False where
    /// nothing was left to ask.
    pub(super) fn get_round(
        &self,
        batch: &mut [GetItem<'_>],
        tried: &mut [Vec<PeerId>],
        deadline: Instant,
    ) -> bool {
        let groups = self.groups(batch, tried);
        let mut outcomes: Vec<Option<GetOutcome>> = vec![None; batch.len()];
        let mut parts: Vec<Option<Part<'_>>> =
            batch.iter_mut().enumerate().map(|(item_idx, item)| Some(Part::of(item_idx, item))).collect();
        let mut reads: Vec<PeerRead<'_>> = Vec::with_capacity(groups.len());
        for (peer, items) in &groups {
            let parts: Vec<Part<'_>> = items.iter().filter_map(|item_idx| parts[*item_idx].take()).collect();
            let n_bytes = parts.iter().map(|part| part.n_bytes() as u64).sum();
            let read = self.begin_read(peer, parts, n_bytes, deadline);
            if read.is_none() {
                peer.asked_bytes.fetch_sub(n_bytes, Ordering::Relaxed);
                for item_idx in items {
                    outcomes[*item_idx] = Some(GetOutcome::Skipped);
                }
            }
            reads.extend(read);
        }
        let mut shares: Vec<&mut Share<'_>> = reads.iter_mut().flat_map(|read| &mut read.shares).collect();
        let n_bytes: usize = shares.iter().flat_map(|share| &share.parts).map(Part::n_bytes).sum();
        if let Some((own, others)) = shares.split_first_mut() {
            if n_bytes < 2 * SHARE_BYTES {
                own.receive();
                for share in others {
                    share.receive();
                }
            } else {
                // The scope waits for all of them.
                std::thread::scope(|scope| {
                    for share in others {
                        scope.spawn(|| share.receive());
                    }
                    own.receive();
                });
            }
        }
        for read in reads {
            self.end_read(read, &mut outcomes);
        }
        for (item, outcome) in batch.iter_mut().zip(outcomes) {
            if let Some(outcome) = outcome {
                item.outcome = outcome;
            }
        }
        !groups.is_empty()
    }

    /// The open items by the peers that are asked for them.
    fn groups(&self, batch: &[GetItem<'_>], tried: &mut [Vec<PeerId>]) -> Vec<(Arc<Peer>, Vec<usize>)> {
        let now = Instant::now();
        let peers = self.peers.read().clone();
        let mut groups: Vec<(Arc<Peer>, Vec<usize>)> = Vec::new();
        for (item_idx, item) in batch.iter().enumerate() {
            if item.outcome.is_hit() {
                continue;
            }
            let holders = self.locations.holders(&item.key, now);
            let chosen = peers
                .iter()
                .filter(|peer| holders.contains(&peer.id) && !tried[item_idx].contains(&peer.id))
                .min_by_key(|peer| peer.asked_bytes.load(Ordering::Relaxed));
            let Some(peer) = chosen else { continue };
            tried[item_idx].push(peer.id);
            peer.asked_bytes.fetch_add(item.n_bytes() as u64, Ordering::Relaxed);
            // An item is two ranges of a request at most.
            match groups.iter_mut().find(|(other, items)| other.id == peer.id && items.len() < MAX_ITEMS / 2)
            {
                Some((_, items)) => items.push(item_idx),
                None => groups.push((Arc::clone(peer), vec![item_idx])),
            }
        }
        groups
    }

    /// Sends the requests of a group; `None` where the peer is left alone or busy, or cannot be reached.
    fn begin_read<'a>(
        &self,
        peer: &'a Arc<Peer>,
        parts: Vec<Part<'a>>,
        n_bytes: u64,
        deadline: Instant,
    ) -> Option<PeerRead<'a>> {
        let permit = peer.reads.enter()?;
        let n_allowed = self.options.n_connections;
        let own = match peer.borrow(&self.dialer, n_allowed, deadline) {
            Ok(Some(own)) => own,
            Ok(None) => {
                permit.settle([Verdict::Nothing].into_iter());
                return None;
            }
            Err(error) => {
                self.fail(peer, permit, &error);
                return None;
            }
        };
        let n_useful = (n_bytes as usize / SHARE_BYTES).clamp(1, n_allowed);
        let mut has_dialled = false;
        let spare = (1..n_useful)
            .map_while(|_| peer.borrow_spare(&self.dialer, n_allowed, deadline, &mut has_dialled));
        let connections: Vec<Borrowed> = std::iter::once(own).chain(spare).collect();
        let mut shares = Vec::with_capacity(connections.len());
        let parts = shared_out(parts, connections.len());
        for (mut borrowed, parts) in connections.into_iter().zip(parts) {
            let sent = borrowed.with(|connection| connection.send_reads(&parts));
            let failure = sent.err().map(|error| failed(peer, &error));
            shares.push(Share { borrowed, parts, failure });
        }
        Some(PeerRead { peer, permit, n_bytes, shares })
    }

    /// Notes what came of a group.
    fn end_read(&self, read: PeerRead<'_>, outcomes: &mut [Option<GetOutcome>]) {
        let PeerRead { peer, permit, n_bytes, shares } = read;
        let (mut verdict, mut failure) = (Verdict::Success, None);
        for Share { borrowed, parts, failure: share_failure } in shares {
            for part in parts {
                if matches!(part.outcome, GetOutcome::Corrupt(_)) {
                    verdict = Verdict::Failure;
                }
                if !part.outcome.is_hit() && share_failure.is_none() {
                    self.locations.forget(&part.key, peer.id);
                }
                // A chunk is there if all of its parts are.
                let outcome = &mut outcomes[part.item_idx];
                if outcome.as_ref().is_none_or(GetOutcome::is_hit) {
                    *outcome = Some(part.outcome);
                }
            }
            match share_failure {
                None => borrowed.give_back(),
                Some(error) => failure = Some(error),
            }
        }
        peer.asked_bytes.fetch_sub(n_bytes, Ordering::Relaxed);
        match failure {
            Some(error) => self.fail(peer, permit, &error),
            None => permit.settle([verdict].into_iter()),
        }
    }
}

impl Share<'_> {
    /// Reads the answers.
    fn receive(&mut self) {
        let peer = Arc::clone(self.borrowed.peer());
        for part in &mut self.parts {
            if self.failure.is_none() {
                match self.borrowed.with(|connection| connection.receive(part)) {
                    Ok(outcome) => part.outcome = outcome,
                    Err(error) => self.failure = Some(failed(&peer, &error)),
                }
            }
            if let Some(error) = &self.failure {
                part.outcome = GetOutcome::Failed(error.clone());
            }
        }
    }
}

fn failed(peer: &Peer, error: &std::io::Error) -> TierError {
    TierError::remote(format!("read from peer {}", peer.address), error, true)
}
