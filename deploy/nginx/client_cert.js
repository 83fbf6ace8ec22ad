// The certificate that the handshake verified, as RFC 9440 writes it; nothing where there is none.

function header(r) {
    if (r.variables.ssl_client_verify !== 'SUCCESS') {
        return '';
    }
    const pem = r.variables.ssl_client_raw_cert;
    return ':' + pem.replace(/-----[A-Z ]+-----|\s/g, '') + ':';
}

export default { header };
