//! Which server of a cluster has which keys.

use kvik_types::RedisEndpoint as Endpoint;

use super::resp::Reply;

/// Slots of every cluster.
pub(super) const N_SLOTS: u16 = 16384;

/// Slots that one server has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SlotRange {
    pub(super) first: u16,
    pub(super) last: u16,
    pub(super) endpoint: Endpoint,
}

/// The slot of a key whose tag, the part between braces, is `tag`.
pub(super) fn slot_of_tag(tag: &[u8]) -> u16 {
    crc16(tag) % N_SLOTS
}

/// Reads the answer to `CLUSTER SLOTS`, sorted; `asked` is the server that gave it.
///
/// A server may leave out its host where clients should use the one they know.
pub(super) fn parse_slots(reply: &Reply, asked: &Endpoint) -> Option<Vec<SlotRange>> {
    let Reply::Array(entries) = reply else { return None };
    let mut ranges = entries.iter().map(|entry| parse_range(entry, asked)).collect::<Option<Vec<_>>>()?;
    ranges.sort_by_key(|range| range.first);
    let is_disjoint = ranges.windows(2).all(|pair| pair[0].last < pair[1].first);
    (is_disjoint && !ranges.is_empty()).then_some(ranges)
}

fn parse_range(entry: &Reply, asked: &Endpoint) -> Option<SlotRange> {
    let Reply::Array(fields) = entry else { return None };
    let [Reply::Integer(first), Reply::Integer(last), Reply::Array(primary), ..] = fields.as_slice() else {
        return None;
    };
    let [host, Reply::Integer(port), ..] = primary.as_slice() else { return None };
    let host = match (host, asked) {
        (Reply::Bytes(host), _) if !host.is_empty() && host != b"?" => {
            String::from_utf8(host.clone()).ok()?
        }
        (_, Endpoint::Tcp { host, .. }) => host.clone(),
        (_, Endpoint::Unix(_)) => return None,
    };
    let (first, last) = (u16::try_from(*first).ok()?, u16::try_from(*last).ok()?);
    let endpoint = Endpoint::Tcp { host, port: u16::try_from(*port).ok()? };
    (first <= last && last < N_SLOTS).then_some(SlotRange { first, last, endpoint })
}

/// CRC-16 with the polynomial 0x1021 and nothing else, as clusters compute it.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| (crc << 8) ^ CRC16_TABLE[usize::from((crc >> 8) as u8 ^ byte)])
}

const CRC16_TABLE: [u16; 256] = {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = (byte as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
};
