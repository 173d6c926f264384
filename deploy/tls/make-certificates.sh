#!/usr/bin/env bash
# Make a certificate authority, and certificates for scheduler, workers and clients.
#
#   ./make-certificates.sh DIRECTORY [DAYS]
#
# DIRECTORY is made with mode 0700, and must be new or empty. Certificates are good for
# DAYS, 365 unless given. Dask accepts whoever has a certificate of this authority,
# whatever its name: keep ca-key.pem off the cluster's hosts, and give each host only what
# it needs: ca.pem, and certificate and key of its role. dask.yaml is the configuration that
# uses them.
set -euo pipefail

if (($# < 1 || $# > 2)) || [[ $1 == -* || ! ${2:-365} =~ ^[1-9][0-9]*$ ]]; then
    sed -n 's/^# \{0,1\}//; 2,10p' "$0" >&2
    exit 2
fi
directory="$1"
days="${2:-365}"
roles=(scheduler worker client)

umask 077
mkdir -p -- "$directory"
chmod 0700 -- "$directory"
cd -- "$directory"
if [[ -n "$(ls -A)" ]]; then
    echo "$directory is not empty: give another one, or move away what is there" >&2
    exit 2
fi
directory="$PWD"

# New ones replace old ones only all together: an authority is not used twice.
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc \
    -keyout ca-key.pem -out ca.pem -days "$days" -subj "/CN=daskinfer authority" \
    -addext "basicConstraints=critical,CA:TRUE" \
    -addext "keyUsage=critical,keyCertSign,cRLSign" 2>/dev/null
for role in "${roles[@]}"; do
    openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc \
        -keyout "$role-key.pem" -out "$role.csr" -subj "/CN=daskinfer $role" 2>/dev/null
    # Workers and scheduler both call and are called.
    openssl x509 -req -in "$role.csr" -out "$role.pem" -days "$days" \
        -CA ca.pem -CAkey ca-key.pem -CAcreateserial -extfile <(
            echo "basicConstraints=critical,CA:FALSE"
            echo "keyUsage=critical,digitalSignature"
            echo "extendedKeyUsage=serverAuth,clientAuth"
        ) 2>/dev/null
    rm "$role.csr"
done
rm -f ca.srl

{
    echo "# In ~/.config/dask or /etc/dask of every host, with the paths as they are there."
    echo "distributed:"
    echo "  comm:"
    echo "    default-scheme: tls"
    echo "    require-encryption: true"
    echo "    tls:"
    echo "      ca-file: \"$directory/ca.pem\""
    for role in "${roles[@]}"; do
        echo "      $role:"
        echo "        cert: \"$directory/$role.pem\""
        echo "        key: \"$directory/$role-key.pem\""
    done
} >dask.yaml
echo "Made an authority, certificates for ${roles[*]}, and dask.yaml in $directory"
