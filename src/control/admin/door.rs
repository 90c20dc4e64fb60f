//! Who may manage workers.
//!
//! Takes requests, lets those in that bring the token. Without a token it lets in whoever reaches the listener, but no
//! page in a browser: none that sends its own origin, and none that has made a name of its own point here.

use std::net::IpAddr;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use super::{Admin, error};

/// Checks a request before its handler sees it.
pub async fn check(State(admin): State<Admin>, request: Request, next: Next) -> Response {
    let headers = request.headers();
    let is_write = !request.method().is_safe();
    let config = admin.config();
    if let Some(token) = &config.admin_token {
        if !bearer(headers).is_some_and(|given| token.is(given)) {
            let why = "The admin listener wants its token (--admin-token) as Authorization: Bearer ….";
            let challenge = [(header::WWW_AUTHENTICATE, "Bearer")];
            return (challenge, error(StatusCode::UNAUTHORIZED, "invalid_admin_token", why)).into_response();
        }
    } else if !config.admin_open && !names_an_address(headers) {
        let why = "Without a token (--admin-token) the admin listener answers only under an IP address or localhost.";
        return error(StatusCode::MISDIRECTED_REQUEST, "misdirected", why);
    }
    // Browsers send it with everything that changes something, and nobody else does.
    if is_write && headers.contains_key(header::ORIGIN) {
        let why = "Web pages may not manage workers: send the request without an Origin header.";
        return error(StatusCode::FORBIDDEN, "from_a_web_page", why);
    }
    next.run(request).await
}

fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let (scheme, token) = headers.get(header::AUTHORIZATION)?.as_bytes().split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"bearer ").then_some(token)
}

/// Whether Host is an IP address or `localhost`: a name that somebody else can let point here is neither.
fn names_an_address(headers: &HeaderMap) -> bool {
    let Some(host) = headers.get(header::HOST).and_then(|host| host.to_str().ok()) else { return false };
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split_once(']').map_or("", |(name, _)| name),
        None => host.split_once(':').map_or(host, |(name, _)| name),
    };
    name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_others_are_no_addresses() {
        let host = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(header::HOST, text.parse().unwrap());
            names_an_address(&headers)
        };
        for good in ["localhost", "LOCALHOST:29000", "127.0.0.1", "10.0.0.1:80", "[::1]", "[::1]:29000"] {
            assert!(host(good), "{good}");
        }
        for bad in ["", "evil.example", "evil.example:29000", "localhost.evil.example", "1.2.3", "[::1", "::1"] {
            assert!(!host(bad), "{bad}");
        }
        assert!(!names_an_address(&HeaderMap::new()));
    }
}
